//! Idempotency keys: a request that is sent twice with the same key is carried out once, and answered twice alike. Pure.

use std::collections::BTreeSet;

use godwit_api::control::{Problem, ProblemCode};

/// How long a key is kept.
pub(crate) const KEPT_MS: u64 = 24 * 3600 * 1000;
/// The most keys that are kept of one caller.
pub(crate) const MOST_OF_CALLER: usize = 2_000;
/// The most that are forgotten at a time: one transaction holds them.
const MOST_FORGOTTEN: usize = 100;
const MOST_KEY_BYTES: usize = 255;

/// A request that has a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Keyed {
    /// What it is kept by: of caller and key.
    pub(crate) id: String,
    /// Of the caller, what the ids of all of its keys begin with.
    pub(crate) caller: String,
    /// Of method, path and body.
    pub(crate) digest: blake3::Hash,
}

/// What is kept of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Asked {
    /// When it was begun.
    pub(crate) unix_ms: u64,
    /// Of method, path and body.
    pub(crate) digest: blake3::Hash,
    /// How it was answered; none: it was begun, and whoever carried it out did not come to say.
    pub(crate) answer: Option<Answered>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answered {
    pub(crate) status: u16,
    pub(crate) media_type: String,
    /// The body; none: it is told once only, or is too long to be kept.
    pub(crate) body: Option<String>,
}

impl Keyed {
    /// A caller's request.
    ///
    /// # Errors
    /// [`ProblemCode::InvalidRequest`]: that can't be a key.
    pub(crate) fn new(
        caller: &str,
        key: &[u8],
        target: &str,
        body: &[u8],
    ) -> Result<Keyed, Problem> {
        if !(1..=MOST_KEY_BYTES).contains(&key.len()) || !key.iter().all(u8::is_ascii_graphic) {
            let remedy = "give 1 to 255 visible ASCII characters, a new UUID for each request";
            let detail = "the Idempotency-Key can't be a key";
            return Err(Problem::new(ProblemCode::InvalidRequest, detail, remedy));
        }
        let caller = blake3::hash(caller.as_bytes()).to_hex().to_string();
        // Its length in front: no two different pairs run together alike.
        let mut of_request = blake3::Hasher::new();
        of_request
            .update(&(target.len() as u64).to_le_bytes())
            .update(target.as_bytes())
            .update(body);
        let id = format!("{caller}/{}", blake3::hash(key).to_hex());
        Ok(Keyed { id, caller, digest: of_request.finalize() })
    }

    /// Whether the request is to be carried out, by what is kept of its key; else how it was answered.
    ///
    /// # Errors
    /// [`ProblemCode::KeyReused`]: the key was used for another request. [`ProblemCode::Conflict`]: it was begun, or done, and its answer
    /// can't be told again.
    pub(crate) fn judge(
        &self,
        kept: Option<&Asked>,
        now_unix_ms: u64,
    ) -> Result<Option<Answered>, Problem> {
        let Some(kept) = kept.filter(|kept| now_unix_ms < kept.unix_ms.saturating_add(KEPT_MS))
        else {
            return Ok(None);
        };
        if kept.digest != self.digest {
            let detail = "this Idempotency-Key was used for another request";
            return Err(Problem::new(
                ProblemCode::KeyReused,
                detail,
                "take a new key for each request",
            ));
        }
        let conflict =
            |detail: &str, remedy: &str| Err(Problem::new(ProblemCode::Conflict, detail, remedy));
        match &kept.answer {
            None => conflict(
                "this request was begun, and the manager that carried it out ended before it was answered",
                "look whether it was done, and ask again with a new key if not",
            ),
            Some(Answered { body: None, .. }) => conflict(
                "this request was done, and its answer is told once only",
                "if the answer is lost, revoke what was made and ask again with a new key",
            ),
            Some(answer) => Ok(Some(answer.clone())),
        }
    }
}

/// One caller's keys, the oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct KeysOfCaller(BTreeSet<(u64, String)>);

impl FromIterator<(u64, String)> for KeysOfCaller {
    /// When each was begun, milliseconds since 1970, and its id.
    fn from_iter<I: IntoIterator<Item = (u64, String)>>(keys: I) -> KeysOfCaller {
        KeysOfCaller(keys.into_iter().collect())
    }
}

impl KeysOfCaller {
    /// One is begun; those that are not kept any more for that, the oldest first.
    pub(crate) fn begin(&mut self, id: &str, now_unix_ms: u64) -> Vec<String> {
        self.expire(now_unix_ms);
        // It may have failed before, or have expired.
        self.0.retain(|(_, other)| other != id);
        self.0.insert((now_unix_ms, id.to_owned()));
        let beyond = self.0.len().saturating_sub(MOST_OF_CALLER).min(MOST_FORGOTTEN);
        (0..beyond).filter_map(|_| Some(self.0.pop_first()?.1)).collect()
    }

    /// Those that have expired do not count.
    pub(crate) fn expire(&mut self, now_unix_ms: u64) {
        self.0.retain(|(begun_unix_ms, _)| now_unix_ms < begun_unix_ms.saturating_add(KEPT_MS));
    }

    /// Whether there are none.
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// What a caller is told whose request with this key is being carried out.
#[must_use]
pub(crate) fn under_way() -> Problem {
    let detail = "a request with this Idempotency-Key is being carried out";
    Problem::new(ProblemCode::Conflict, detail, "ask again in a moment: its answer is told then")
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 10 * KEPT_MS;

    fn keyed() -> Keyed {
        Keyed::new("admin", b"k1", "POST /api/v1/hosts", b"{}").unwrap()
    }

    fn done(body: Option<&str>) -> Asked {
        let answer = Answered {
            status: 201,
            media_type: "application/json".into(),
            body: body.map(str::to_owned),
        };
        Asked { unix_ms: NOW, digest: keyed().digest, answer: Some(answer) }
    }

    #[test]
    fn callers_keys_and_requests_are_told_apart() {
        let one = keyed();
        assert_eq!(Keyed::new("admin", b"k1", "POST /api/v1/hosts", b"{}").unwrap(), one);
        for (caller, key) in [("admi", "nk1"), ("admin", "k2"), ("root", "k1")] {
            assert_ne!(Keyed::new(caller, key.as_bytes(), "POST /", b"").unwrap().id, one.id);
        }
        for (target, body) in [("POST /api/v1/host", "s{}"), ("POST /api/v1/hosts", "{ }")] {
            let other = Keyed::new("admin", b"k1", target, body.as_bytes()).unwrap();
            assert!(other.id == one.id && other.digest != one.digest);
        }
        for key in ["", "\n", "ä", &"k".repeat(256)] {
            assert!(Keyed::new("admin", key.as_bytes(), "POST /", b"").is_err(), "{key}");
        }
    }

    #[test]
    fn what_was_answered_is_answered_again_for_a_day() {
        let kept = done(Some("{}"));
        assert_eq!(keyed().judge(None, NOW), Ok(None));
        assert_eq!(keyed().judge(Some(&kept), NOW + KEPT_MS - 1), Ok(kept.answer.clone()));
        assert_eq!(keyed().judge(Some(&kept), NOW + KEPT_MS), Ok(None));
        let other = Keyed::new("admin", b"k1", "POST /api/v1/hosts", b"[]").unwrap();
        assert_eq!(other.judge(Some(&kept), NOW).unwrap_err().code, ProblemCode::KeyReused);
    }

    #[test]
    fn of_a_caller_the_newest_keys_are_kept() {
        let mut keys = KeysOfCaller::default();
        for number in 0..MOST_OF_CALLER as u64 {
            assert!(keys.begin(&format!("k{number}"), NOW + number).is_empty());
        }
        assert_eq!(keys.begin("more", NOW + 9_000), ["k0"]);
        // One that is begun anew is the newest, and one more than it was.
        assert!(keys.begin("k1", NOW + 9_001).is_empty());
        assert_eq!(keys.begin("k0", NOW + 9_002), ["k2"]);
        assert!(keys.begin("late", NOW + 9_001 + KEPT_MS).is_empty());
        keys.expire(NOW + 9_001 + 2 * KEPT_MS);
        assert!(keys.is_empty());
        // Where the store has more than are kept they go by and by.
        let mut many: KeysOfCaller =
            (0..5_000).map(|number| (NOW + number, format!("k{number}"))).collect();
        assert_eq!(many.begin("k", NOW + 5_000).len(), MOST_FORGOTTEN);
    }

    #[test]
    fn what_can_not_be_told_again_is_not_done_again() {
        for kept in [done(None), Asked { answer: None, ..done(None) }] {
            assert_eq!(keyed().judge(Some(&kept), NOW).unwrap_err().code, ProblemCode::Conflict);
        }
    }
}
