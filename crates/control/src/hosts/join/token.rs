//! Join tokens: each admits one host, once. Pure.

use godwit_api::control::{JoinRequest, JoinTokenInfo, Problem, ProblemCode};
use godwit_pki::Fingerprint;

use crate::access::Secret;

/// Join token without its secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct JoinTokenRecord {
    /// Host that may join with the token.
    pub(crate) host: String,
    /// Address of the host's agent; none: the host names it.
    pub(crate) address: Option<String>,
    pub(crate) made_unix_ms: u64,
    pub(crate) expires_unix_ms: u64,
    pub(crate) made_by: String,
    /// BLAKE3 of the secret.
    pub(crate) digest: blake3::Hash,
    /// Use of the token; none: it is unused.
    pub(crate) used: Option<JoinUse>,
}

/// Use of a join token. A token is used for one key: the host that has the key may repeat the
/// request if it has lost the answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct JoinUse {
    pub(crate) unix_ms: u64,
    /// SHA-256 of the public key that was signed, in hexadecimal digits.
    pub(crate) key: String,
}

/// Returns the one refusal of unknown tokens. It does not depend on what is wrong with the token.
#[must_use]
pub(crate) fn unknown_join_token() -> Problem {
    let remedy = "make a new one with `godwit control join-token create HOST`";
    Problem::new(ProblemCode::Unauthenticated, "unknown join token", remedy)
}

impl JoinTokenRecord {
    /// Returns the public properties of a token.
    #[must_use]
    pub(crate) fn info(&self, id: &str) -> JoinTokenInfo {
        JoinTokenInfo {
            id: id.to_owned(),
            host: self.host.clone(),
            address: self.address.clone(),
            made_unix_ms: self.made_unix_ms,
            expires_unix_ms: self.expires_unix_ms,
            made_by: self.made_by.clone(),
            used_unix_ms: self.used.as_ref().map(|used| used.unix_ms),
        }
    }

    /// Admits a host with a secret and the key of its certificate request. Returns the address of
    /// the host's agent.
    ///
    /// # Errors
    /// - [`ProblemCode::Unauthenticated`]: wrong secret, expired, or used for another key.
    /// - [`ProblemCode::Forbidden`]: the token is for another host or address.
    /// - [`ProblemCode::InvalidRequest`]: neither token nor host names the agent's address.
    pub(crate) fn admit(
        &self,
        secret: &Secret,
        request: &JoinRequest,
        key: Fingerprint,
        now_unix_ms: u64,
    ) -> Result<String, Problem> {
        // Compares in constant time (blake3::Hash).
        if self.digest != secret.digest() {
            return Err(unknown_join_token());
        }
        let refused = |code: ProblemCode, detail: String| {
            Err(Problem::new(
                code,
                detail,
                "make a new one with `godwit control join-token create HOST`",
            ))
        };
        let id = secret.id();
        if self.expires_unix_ms <= now_unix_ms {
            return refused(
                ProblemCode::Unauthenticated,
                format!("the join token {id} has expired"),
            );
        }
        if self.used.as_ref().is_some_and(|used| used.key != key.hex()) {
            let detail = format!("the join token {id} has been used");
            return refused(ProblemCode::Unauthenticated, detail);
        }
        if self.host != request.host {
            return refused(
                ProblemCode::Forbidden,
                format!("the join token {id} is for another host"),
            );
        }
        match (&self.address, &request.address) {
            (Some(fixed), Some(given)) if fixed != given => refused(
                ProblemCode::Forbidden,
                format!("the join token {id} is for another address"),
            ),
            (Some(address), _) | (None, Some(address)) => Ok(address.clone()),
            (None, None) => {
                let remedy = "name the agent's address: --address https://IP:7700";
                Err(Problem::new(
                    ProblemCode::InvalidRequest,
                    "the address of the host's agent is missing",
                    remedy,
                ))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(secret: &Secret) -> JoinTokenRecord {
        JoinTokenRecord {
            host: "a".into(),
            address: None,
            made_unix_ms: 1000,
            expires_unix_ms: 2000,
            made_by: "root".into(),
            digest: secret.digest(),
            used: None,
        }
    }

    fn request() -> JoinRequest {
        JoinRequest {
            token: String::new(),
            host: "a".into(),
            address: Some("https://10.0.0.1:7700".into()),
            addresses: vec![],
            request: String::new(),
        }
    }

    #[test]
    fn a_token_admits_one_key_once() {
        let secret = Secret::draw().unwrap();
        let (key, other_key) = (Fingerprint::of(b"key"), Fingerprint::of(b"other"));
        let fresh = record(&secret);
        assert_eq!(fresh.admit(&secret, &request(), key, 1999).unwrap(), "https://10.0.0.1:7700");
        let used =
            JoinTokenRecord { used: Some(JoinUse { unix_ms: 1500, key: key.hex() }), ..fresh };
        assert!(
            used.admit(&secret, &request(), key, 1999).is_ok(),
            "a host that lost the answer repeats the request"
        );
        let refused = used.admit(&secret, &request(), other_key, 1999).unwrap_err();
        assert_eq!(refused.code, ProblemCode::Unauthenticated);
        assert!(refused.detail.contains("has been used"));
    }

    #[test]
    fn another_secret_time_host_or_address_is_refused() {
        let secret = Secret::draw().unwrap();
        let key = Fingerprint::of(b"key");
        let fixed =
            JoinTokenRecord { address: Some("https://10.0.0.9:7700".into()), ..record(&secret) };
        let code = |record: &JoinTokenRecord, request: &JoinRequest, now| {
            record.admit(&secret, request, key, now).unwrap_err().code
        };
        assert_eq!(
            code(&record(&Secret::draw().unwrap()), &request(), 1500),
            ProblemCode::Unauthenticated
        );
        assert_eq!(code(&record(&secret), &request(), 2000), ProblemCode::Unauthenticated);
        let other = JoinRequest { host: "b".into(), ..request() };
        assert_eq!(code(&record(&secret), &other, 1500), ProblemCode::Forbidden);
        assert_eq!(code(&fixed, &request(), 1500), ProblemCode::Forbidden);
        let silent = JoinRequest { address: None, ..request() };
        assert_eq!(code(&record(&secret), &silent, 1500), ProblemCode::InvalidRequest);
        assert_eq!(fixed.admit(&secret, &silent, key, 1500).unwrap(), "https://10.0.0.9:7700");
    }
}
