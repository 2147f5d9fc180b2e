//! Tokens of 32 random bytes. Only a digest is stored, without salt or stretching: 256 random bits
//! are in no list and cannot be guessed.

use std::collections::BTreeMap;
use std::fmt;
use std::io;

use godwit_api::control::{Problem, ProblemCode, Role, TokenInfo};
use rustix::rand::{GetRandomFlags, getrandom};

use super::Caller;

const SECRET_BYTES: usize = 32;
const ID_BYTES: usize = 6;
/// Prefix of every token, so that a token in a log or a repository is recognizable.
const PREFIX: &str = "godwit";

/// Token in the form that its holder gets: `godwit_ID_SECRET`, in hexadecimal digits. It is shown
/// once, and never by `Debug`.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret {
    id: String,
    secret: String,
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}_{}_…", self.id)
    }
}

impl Secret {
    /// Generates a new token.
    ///
    /// # Errors
    /// The kernel returns no random bytes.
    pub fn draw() -> Result<Secret, Problem> {
        let draw = |bytes| {
            random_hex(bytes).map_err(|error| {
                let detail = format!("cannot generate a secret: {error}");
                Problem::new(ProblemCode::ManagerFailed, detail, "")
            })
        };
        Ok(Secret { id: draw(ID_BYTES)?, secret: draw(SECRET_BYTES)? })
    }

    /// Parses a presented token; `None`: it does not have the form of a token.
    #[must_use]
    pub fn parse(text: &str) -> Option<Secret> {
        let is_hex = |text: &str, bytes: usize| {
            text.len() == 2 * bytes && text.bytes().all(|byte| byte.is_ascii_hexdigit())
        };
        let (id, secret) = text.strip_prefix(PREFIX)?.strip_prefix('_')?.split_once('_')?;
        (is_hex(id, ID_BYTES) && is_hex(secret, SECRET_BYTES))
            .then(|| Secret { id: id.to_owned(), secret: secret.to_owned() })
    }

    /// Returns the ID, which is not secret.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Returns the full text for the holder.
    #[must_use]
    pub fn reveal(&self) -> String {
        format!("{PREFIX}_{}_{}", self.id, self.secret)
    }

    /// Returns the digest to store.
    #[must_use]
    pub fn digest(&self) -> blake3::Hash {
        blake3::hash(self.secret.as_bytes())
    }
}

fn random_hex(bytes: usize) -> io::Result<String> {
    let mut random = vec![0; bytes];
    // Up to 256 bytes are returned completely or not at all (getrandom(2)).
    let got = getrandom(&mut random, GetRandomFlags::empty())?;
    if got < bytes {
        return Err(io::Error::other("the kernel returned too few random bytes"));
    }
    Ok(random.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Token without its secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenRecord {
    /// Public properties of the token.
    pub info: TokenInfo,
    /// Digest of the secret.
    pub digest: blake3::Hash,
}

/// All tokens, by ID.
#[derive(Clone, Debug, Default)]
pub struct Tokens {
    all: BTreeMap<String, TokenRecord>,
}

impl Tokens {
    /// Adds a token, or replaces the one with its ID.
    pub fn insert(&mut self, record: TokenRecord) {
        self.all.insert(record.info.id.clone(), record);
    }

    /// Removes a token. Returns whether there was one.
    pub fn remove(&mut self, id: &str) -> bool {
        self.all.remove(id).is_some()
    }

    /// Returns whether there is a token with this ID.
    #[must_use]
    pub fn has(&self, id: &str) -> bool {
        self.all.contains_key(id)
    }

    /// Returns all tokens in the order of their IDs.
    pub fn iter(&self) -> impl Iterator<Item = &TokenRecord> {
        self.all.values()
    }

    /// Returns the holder of a presented token.
    ///
    /// # Errors
    /// [`ProblemCode::Unauthenticated`]: not a token, unknown, or expired. The error is the same
    /// for a wrong secret and an unknown ID.
    pub fn caller(&self, shown: &str, now_unix_ms: u64) -> Result<Caller, Problem> {
        let refused =
            |detail: &str, remedy: &str| Problem::new(ProblemCode::Unauthenticated, detail, remedy);
        let unknown = || {
            let remedy = "the token is mistyped, revoked or of another manager: an admin can \
                create another one with `godwit control token create`; commands read it from \
                GODWIT_TOKEN, programs send `Authorization: Bearer TOKEN`";
            refused("unknown token", remedy)
        };
        let secret = Secret::parse(shown).ok_or_else(unknown)?;
        let record = self.all.get(secret.id()).ok_or_else(unknown)?;
        // Compares in constant time (blake3::Hash).
        if record.digest != secret.digest() {
            return Err(unknown());
        }
        if record.info.expires_unix_ms <= now_unix_ms {
            let detail = format!("the token {} has expired", record.info.name);
            return Err(refused(&detail, "create a new one with `godwit control token create`"));
        }
        let TokenInfo { id, name, role, expires_unix_ms, .. } = &record.info;
        Ok(Caller {
            token: Some(id.clone()),
            until_unix_ms: Some(*expires_unix_ms),
            ..Caller::named(name, *role)
        })
    }
}

impl TokenRecord {
    /// Returns a token with this name and role; `unix_ms`: its creation and its expiry,
    /// milliseconds since 1970.
    #[must_use]
    pub fn new(
        secret: &Secret,
        name: &str,
        role: Role,
        made_by: &str,
        unix_ms: std::ops::Range<u64>,
    ) -> Self {
        let info = TokenInfo {
            id: secret.id.clone(),
            name: name.to_owned(),
            role,
            made_unix_ms: unix_ms.start,
            expires_unix_ms: unix_ms.end,
            made_by: made_by.to_owned(),
        };
        TokenRecord { info, digest: secret.digest() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(secret: &Secret) -> Tokens {
        let mut tokens = Tokens::default();
        tokens.insert(TokenRecord::new(secret, "monitoring", Role::Viewer, "root", 1000..2000));
        tokens
    }

    #[test]
    fn a_token_is_valid_until_it_expires() {
        let secret = Secret::draw().unwrap();
        let tokens = kept(&secret);
        let caller = tokens.caller(&secret.reveal(), 1999).unwrap();
        let token = Some(secret.id().to_owned());
        assert_eq!(
            caller,
            Caller {
                token,
                until_unix_ms: Some(2000),
                ..Caller::named("monitoring", Role::Viewer)
            }
        );
        let late = tokens.caller(&secret.reveal(), 2000).unwrap_err();
        assert_eq!(late.code, ProblemCode::Unauthenticated);
        assert!(late.detail.contains("expired"));
    }

    #[test]
    fn a_wrong_secret_is_as_unknown_as_an_unknown_id() {
        let (secret, other) = (Secret::draw().unwrap(), Secret::draw().unwrap());
        let tokens = kept(&secret);
        let wrong = Secret { id: secret.id.clone(), secret: other.secret.clone() };
        for shown in
            [wrong.reveal(), other.reveal(), String::new(), "godwit_".into(), secret.secret.clone()]
        {
            let refused = tokens.caller(&shown, 1500).unwrap_err();
            assert_eq!(refused.detail, "unknown token");
        }
    }

    #[test]
    fn tokens_of_one_name_are_two_callers() {
        let (one, other) = (Secret::draw().unwrap(), Secret::draw().unwrap());
        let key = |secret: &Secret| kept(secret).caller(&secret.reveal(), 1500).unwrap().key();
        assert_ne!(key(&one), key(&other));
        assert_eq!(Caller::root().key(), "root");
    }

    #[test]
    fn a_revoked_token_is_unknown() {
        let secret = Secret::draw().unwrap();
        let mut tokens = kept(&secret);
        assert!(tokens.remove(secret.id()));
        assert!(!tokens.remove(secret.id()));
        assert!(tokens.caller(&secret.reveal(), 1500).is_err());
    }

    #[test]
    fn debug_output_does_not_show_a_secret() {
        let secret = Secret::draw().unwrap();
        let shown = format!("{secret:?}{:?}", kept(&secret));
        assert!(!shown.contains(&secret.secret));
        assert_eq!(Secret::parse(&secret.reveal()), Some(secret));
    }
}
