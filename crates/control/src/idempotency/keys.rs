//! Idempotency keys: a request that is sent twice with the same key is carried out once and gets
//! the same response twice. Pure.

use std::collections::BTreeSet;

use godwit_api::control::{Problem, ProblemCode};

/// Lifetime of a key.
pub(crate) const KEPT_MS: u64 = 24 * 3600 * 1000;
/// Most keys of one caller.
pub(crate) const MOST_OF_CALLER: usize = 2_000;
/// Most keys that are removed at a time, in one transaction.
const MOST_FORGOTTEN: usize = 100;
const MOST_KEY_BYTES: usize = 255;

/// A request with a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Keyed {
    /// ID of the record, made from caller and key.
    pub(crate) id: String,
    /// Prefix of the IDs of all keys of this caller.
    pub(crate) caller: String,
    /// Digest of method, path and body.
    pub(crate) digest: blake3::Hash,
}

/// Stored state of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoredRequest {
    /// Start of the request, milliseconds since 1970.
    pub(crate) unix_ms: u64,
    /// Digest of method, path and body.
    pub(crate) digest: blake3::Hash,
    /// The response. `None`: the request was begun and its outcome was not recorded.
    pub(crate) answer: Option<StoredResponse>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoredResponse {
    pub(crate) status: u16,
    pub(crate) media_type: String,
    /// The body. `None`: it is shown only once, or too long to be stored.
    pub(crate) body: Option<String>,
}

impl Keyed {
    /// Creates the key of a caller's request.
    ///
    /// # Errors
    /// [`ProblemCode::InvalidRequest`]: the key is invalid.
    pub(crate) fn new(
        caller: &str,
        key: &[u8],
        target: &str,
        body: &[u8],
    ) -> Result<Keyed, Problem> {
        if !(1..=MOST_KEY_BYTES).contains(&key.len()) || !key.iter().all(u8::is_ascii_graphic) {
            let remedy =
                "use 1 to 255 visible ASCII characters, such as a new UUID for each request";
            let detail = "the Idempotency-Key is invalid";
            return Err(Problem::new(ProblemCode::InvalidRequest, detail, remedy));
        }
        let caller = blake3::hash(caller.as_bytes()).to_hex().to_string();
        // The length prefix keeps different pairs from having the same concatenation.
        let mut of_request = blake3::Hasher::new();
        of_request
            .update(&(target.len() as u64).to_le_bytes())
            .update(target.as_bytes())
            .update(body);
        let id = format!("{caller}/{}", blake3::hash(key).to_hex());
        Ok(Keyed { id, caller, digest: of_request.finalize() })
    }

    /// Decides by the key's record whether to carry out the request. Otherwise returns the earlier
    /// response.
    ///
    /// # Errors
    /// [`ProblemCode::KeyReused`]: the key belongs to another request.
    /// [`ProblemCode::Conflict`]: the request was begun or done, and its response cannot be
    /// repeated.
    pub(crate) fn judge(
        &self,
        kept: Option<&StoredRequest>,
        now_unix_ms: u64,
    ) -> Result<Option<StoredResponse>, Problem> {
        let Some(kept) = kept.filter(|kept| now_unix_ms < kept.unix_ms.saturating_add(KEPT_MS))
        else {
            return Ok(None);
        };
        if kept.digest != self.digest {
            let detail = "this Idempotency-Key was used for another request";
            return Err(Problem::new(
                ProblemCode::KeyReused,
                detail,
                "use a new key for each request",
            ));
        }
        let conflict =
            |detail: &str, remedy: &str| Err(Problem::new(ProblemCode::Conflict, detail, remedy));
        match &kept.answer {
            None => conflict(
                "this request was begun, and its manager ended before it recorded the response",
                "check whether the request was carried out; if not, repeat it with a new key",
            ),
            Some(StoredResponse { body: None, .. }) => conflict(
                "this request was carried out, and its response is shown only once",
                "if the response is lost, revoke the result and repeat the request with a new key",
            ),
            Some(answer) => Ok(Some(answer.clone())),
        }
    }
}

/// Keys of one caller, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct KeysOfCaller(BTreeSet<(u64, String)>);

impl FromIterator<(u64, String)> for KeysOfCaller {
    /// Collects pairs of the start of a request (milliseconds since 1970) and its ID.
    fn from_iter<I: IntoIterator<Item = (u64, String)>>(keys: I) -> KeysOfCaller {
        KeysOfCaller(keys.into_iter().collect())
    }
}

impl KeysOfCaller {
    /// Adds a key. Returns the keys that are evicted for it, oldest first.
    pub(crate) fn begin(&mut self, id: &str, now_unix_ms: u64) -> Vec<String> {
        self.expire(now_unix_ms);
        // An earlier request with this key may have failed or expired.
        self.0.retain(|(_, other)| other != id);
        self.0.insert((now_unix_ms, id.to_owned()));
        let beyond = self.0.len().saturating_sub(MOST_OF_CALLER).min(MOST_FORGOTTEN);
        (0..beyond).filter_map(|_| Some(self.0.pop_first()?.1)).collect()
    }

    /// Removes expired keys.
    pub(crate) fn expire(&mut self, now_unix_ms: u64) {
        self.0.retain(|(begun_unix_ms, _)| now_unix_ms < begun_unix_ms.saturating_add(KEPT_MS));
    }

    /// Returns whether the caller has no keys.
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Returns the problem for a request whose key belongs to a request in progress.
#[must_use]
pub(crate) fn under_way() -> Problem {
    let detail = "a request with this Idempotency-Key is being carried out";
    Problem::new(
        ProblemCode::Conflict,
        detail,
        "repeat the request in a moment to get its response",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 10 * KEPT_MS;

    fn keyed() -> Keyed {
        Keyed::new("admin", b"k1", "POST /api/v1/hosts", b"{}").unwrap()
    }

    fn done(body: Option<&str>) -> StoredRequest {
        let answer = StoredResponse {
            status: 201,
            media_type: "application/json".into(),
            body: body.map(str::to_owned),
        };
        StoredRequest { unix_ms: NOW, digest: keyed().digest, answer: Some(answer) }
    }

    #[test]
    fn callers_keys_and_requests_are_distinguished() {
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
    fn a_response_is_repeated_for_a_day() {
        let kept = done(Some("{}"));
        assert_eq!(keyed().judge(None, NOW), Ok(None));
        assert_eq!(keyed().judge(Some(&kept), NOW + KEPT_MS - 1), Ok(kept.answer.clone()));
        assert_eq!(keyed().judge(Some(&kept), NOW + KEPT_MS), Ok(None));
        let other = Keyed::new("admin", b"k1", "POST /api/v1/hosts", b"[]").unwrap();
        assert_eq!(other.judge(Some(&kept), NOW).unwrap_err().code, ProblemCode::KeyReused);
    }

    #[test]
    fn the_newest_keys_of_a_caller_are_retained() {
        let mut keys = KeysOfCaller::default();
        for number in 0..MOST_OF_CALLER as u64 {
            assert!(keys.begin(&format!("k{number}"), NOW + number).is_empty());
        }
        assert_eq!(keys.begin("more", NOW + 9_000), ["k0"]);
        // A key that is used again becomes the newest, so no key is evicted.
        assert!(keys.begin("k1", NOW + 9_001).is_empty());
        assert_eq!(keys.begin("k0", NOW + 9_002), ["k2"]);
        assert!(keys.begin("late", NOW + 9_001 + KEPT_MS).is_empty());
        keys.expire(NOW + 9_001 + 2 * KEPT_MS);
        assert!(keys.is_empty());
        // If the store has too many keys, they are evicted gradually.
        let mut many: KeysOfCaller =
            (0..5_000).map(|number| (NOW + number, format!("k{number}"))).collect();
        assert_eq!(many.begin("k", NOW + 5_000).len(), MOST_FORGOTTEN);
    }

    #[test]
    fn a_request_without_a_repeatable_response_is_not_repeated() {
        for kept in [done(None), StoredRequest { answer: None, ..done(None) }] {
            assert_eq!(keyed().judge(Some(&kept), NOW).unwrap_err().code, ProblemCode::Conflict);
        }
    }
}
