//! Bearer tokens of an OpenID Connect issuer: JSON web tokens (RFC 7519) signed for the manager's
//! audience. Pure: keys and time are parameters.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use godwit_api::control::{Problem, ProblemCode, Role};
use jsonwebtoken::jwk::{Jwk, JwkSet, PublicKeyUse};
use jsonwebtoken::{Algorithm, DecodingKey, Validation, decode, decode_header};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::Caller;

/// Accepted signature algorithms. Never `none`, and never one with a shared secret (RFC 8725,
/// section 3.1).
const ALGORITHMS: [Algorithm; 3] = [Algorithm::RS256, Algorithm::ES256, Algorithm::EdDSA];
/// Tolerated clock difference between issuer and manager, seconds.
const CLOCKS_DIFFER_S: u64 = 60;
/// Longest name in the audit log, bytes.
const MOST_NAME_BYTES: usize = 128;

/// Issuer whose tokens are accepted, and the meaning of their claims.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OidcRules {
    /// Issuer, as in the claim `iss`.
    pub issuer: String,
    /// Audience of tokens for this manager, as in the claim `aud`.
    pub audience: String,
    /// Claim with the roles of the holder: a string or a list of strings.
    #[serde(default = "default_role_claim")]
    pub role_claim: String,
    /// Claim with the name of the holder.
    #[serde(default = "default_name_claim")]
    pub name_claim: String,
    /// Values of the role claim for each role; empty: the name of the role.
    #[serde(default)]
    pub roles: BTreeMap<Role, Vec<String>>,
    /// File with the certificates of the issuer's authorities; `None`: those of the distribution.
    #[serde(default)]
    pub authority: Option<PathBuf>,
}

fn default_role_claim() -> String {
    "godwit_role".to_owned()
}

fn default_name_claim() -> String {
    "sub".to_owned()
}

/// Reasons to refuse a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OidcRefusal {
    /// Signed with an unknown key: the issuer may have a new one.
    UnknownKey,
    /// Not acceptable.
    Refused(Problem),
}

#[derive(Deserialize)]
struct Claims {
    iss: String,
    aud: OneOrMany,
    sub: String,
    /// Seconds since 1970; some issuers send fractions.
    exp: f64,
    #[serde(default)]
    nbf: Option<f64>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl OneOrMany {
    fn contains(&self, text: &str) -> bool {
        match self {
            OneOrMany::One(one) => one == text,
            OneOrMany::Many(many) => many.iter().any(|one| one == text),
        }
    }
}

/// Returns whether a bearer token has the form of a JSON web token; the manager's own tokens have
/// no dot.
#[must_use]
pub fn is_web_token(token: &str) -> bool {
    token.bytes().filter(|byte| *byte == b'.').count() == 2
}

/// Returns the holder of a token.
///
/// # Errors
/// [`OidcRefusal`]: [`ProblemCode::Unauthenticated`] for an invalid token,
/// [`ProblemCode::Forbidden`] for a holder without a role.
pub fn caller(
    token: &str,
    keys: &JwkSet,
    rules: &OidcRules,
    now_unix_ms: u64,
) -> Result<Caller, OidcRefusal> {
    let header =
        decode_header(token).map_err(|error| refused(&format!("cannot read it: {error}")))?;
    if !ALGORITHMS.contains(&header.alg) {
        return Err(refused(
            "its signature algorithm is not accepted (RS256, ES256 and EdDSA are)",
        ));
    }
    let key = key_of(keys, header.kid.as_deref(), header.alg)?;
    let key = DecodingKey::from_jwk(key).map_err(|_| refused("its key is not usable"))?;
    // Only checks the signature: `check_claims` checks the claims, at the given time.
    let mut validation = Validation::new(header.alg);
    validation.required_spec_claims.clear();
    (validation.validate_exp, validation.validate_aud) = (false, false);
    let claims = decode::<Claims>(token, &key, &validation)
        .map_err(|error| refused(&format!("it is invalid: {error}")))?
        .claims;
    check_claims(&claims, rules, now_unix_ms).map_err(refused)?;
    let holder = named(&claims, rules).map_err(OidcRefusal::Refused)?;
    Ok(Caller { until_unix_ms: Some(good_until_unix_ms(&claims)), ..holder })
}

fn refused(why: &str) -> OidcRefusal {
    let remedy = "get a new token from the issuer, for the audience in [oidc] of the manager's \
        configuration";
    let detail = format!("the token of the OIDC issuer is refused: {why}");
    OidcRefusal::Refused(Problem::new(ProblemCode::Unauthenticated, detail, remedy))
}

/// Returns the key of a token. A token that names no key needs an issuer with only one.
fn key_of<'a>(
    keys: &'a JwkSet,
    id: Option<&str>,
    algorithm: Algorithm,
) -> Result<&'a Jwk, OidcRefusal> {
    let key = match id {
        Some(id) => keys.find(id),
        None => keys.keys.first().filter(|_| keys.keys.len() == 1),
    };
    let key = key.ok_or(OidcRefusal::UnknownKey)?;
    let of_key = key.common.key_algorithm.and_then(|of_key| of_key.to_string().parse().ok());
    let is_for_signatures =
        matches!(key.common.public_key_use, None | Some(PublicKeyUse::Signature));
    if !is_for_signatures || of_key.is_some_and(|of_key: Algorithm| of_key != algorithm) {
        return Err(refused("its key is for another purpose"));
    }
    Ok(key)
}

fn check_claims(claims: &Claims, rules: &OidcRules, now_unix_ms: u64) -> Result<(), &'static str> {
    let seconds = |ms: u64| ms as f64 / 1e3;
    let (now, differ) = (seconds(now_unix_ms), seconds(CLOCKS_DIFFER_S * 1000));
    if claims.iss != rules.issuer {
        return Err("it is from another issuer");
    }
    if !claims.aud.contains(&rules.audience) {
        return Err("it is for another audience");
    }
    if claims.exp + differ <= now {
        return Err("it has expired");
    }
    if claims.nbf.is_some_and(|begins| begins - differ > now) {
        return Err("it is not valid yet");
    }
    Ok(())
}

/// Returns when a valid token expires, milliseconds since 1970, with the tolerated clock
/// difference.
fn good_until_unix_ms(claims: &Claims) -> u64 {
    // A number that is not a valid duration means never.
    let expires = Duration::try_from_secs_f64(claims.exp).unwrap_or(Duration::MAX);
    let until = expires.saturating_add(Duration::from_secs(CLOCKS_DIFFER_S));
    u64::try_from(until.as_millis()).unwrap_or(u64::MAX)
}

/// Returns the holder with its name and the highest of its roles.
fn named(claims: &Claims, rules: &OidcRules) -> Result<Caller, Problem> {
    let named = claims.others.get(&rules.name_claim).and_then(Value::as_str);
    let name =
        if rules.name_claim == "sub" { claims.sub.as_str() } else { named.unwrap_or(&claims.sub) };
    if name.is_empty() || name.len() > MOST_NAME_BYTES || name.chars().any(char::is_control) {
        let detail = "the name of the token's holder is not valid in the audit log";
        return Err(Problem::new(
            ProblemCode::Unauthenticated,
            detail,
            "set name_claim of [oidc] to another",
        ));
    }
    // The prefix separates the issuer's names from those of the manager's tokens.
    let name = format!("oidc:{name}");
    let claim = claims.others.get(&rules.role_claim);
    let values: Vec<&str> = match claim {
        Some(Value::String(one)) => vec![one],
        Some(Value::Array(many)) => many.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    let makes = |role: Role| match rules.roles.is_empty() {
        true => values.contains(&role.name()),
        false => rules
            .roles
            .get(&role)
            .is_some_and(|all| all.iter().any(|one| values.contains(&one.as_str()))),
    };
    let role = [Role::Admin, Role::Operator, Role::Viewer].into_iter().find(|role| makes(*role));
    let Some(role) = role else {
        let detail = format!("{name} has no role by the claim {}", rules.role_claim);
        let remedy = "have the issuer add a role, or set the holder's group under [oidc.roles]";
        return Err(Problem::new(ProblemCode::Forbidden, detail, remedy));
    };
    Ok(Caller::named(name, role))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW_MS: u64 = 1_000_000_000;

    fn rules() -> OidcRules {
        toml::from_str("issuer = \"https://i\"\naudience = \"godwit\"").unwrap()
    }

    fn claims(changes: &Value) -> Claims {
        let mut all = serde_json::json!({
            "iss": "https://i", "aud": ["x", "godwit"], "sub": "u1", "exp": 1_000_100,
        });
        for (name, value) in changes.as_object().unwrap() {
            all[name] = value.clone();
        }
        serde_json::from_value(all).unwrap()
    }

    #[test]
    fn only_its_issuer_audience_and_time_are_valid() {
        let check = |changes: Value| check_claims(&claims(&changes), &rules(), NOW_MS);
        assert_eq!(check(serde_json::json!({})), Ok(()));
        assert_eq!(check(serde_json::json!({ "exp": 999_941.5, "nbf": 1_000_060 })), Ok(()));
        assert_eq!(
            good_until_unix_ms(&claims(&serde_json::json!({ "exp": 999_941.5 }))),
            1_000_001_500
        );
        assert_eq!(good_until_unix_ms(&claims(&serde_json::json!({ "exp": 1e300 }))), u64::MAX);
        for (changes, why) in [
            (serde_json::json!({ "iss": "https://i/" }), "issuer"),
            (serde_json::json!({ "aud": "god" }), "audience"),
            (serde_json::json!({ "exp": 999_940 }), "expired"),
            (serde_json::json!({ "nbf": 1_000_061 }), "yet"),
        ] {
            assert!(check(changes).unwrap_err().contains(why));
        }
    }

    #[test]
    fn the_highest_role_counts_and_no_role_is_forbidden() {
        let of = |rules: &OidcRules, changes: Value| named(&claims(&changes), rules);
        let caller =
            of(&rules(), serde_json::json!({ "godwit_role": ["viewer", "operator"] })).unwrap();
        assert_eq!(caller, Caller::named("oidc:u1", Role::Operator));
        for wrong in [serde_json::json!({}), serde_json::json!({ "godwit_role": "root" })] {
            assert_eq!(of(&rules(), wrong).unwrap_err().code, ProblemCode::Forbidden);
        }
        let groups: OidcRules = toml::from_str(
            "issuer = \"https://i\"\naudience = \"godwit\"\n\
            role_claim = \"groups\"\nname_claim = \"preferred_username\"\n\
            [roles]\nadmin = [\"vm-admins\"]\nviewer = [\"staff\"]",
        )
        .unwrap();
        let caller =
            of(&groups, serde_json::json!({ "groups": ["staff"], "preferred_username": "ann" }))
                .unwrap();
        assert_eq!(caller, Caller::named("oidc:ann", Role::Viewer));
        // With configured groups, a group with the name of a role is not that role.
        assert!(of(&groups, serde_json::json!({ "groups": ["admin"] })).is_err());
        assert!(
            of(&rules(), serde_json::json!({ "sub": "a\nb", "godwit_role": "admin" })).is_err()
        );
    }
}
