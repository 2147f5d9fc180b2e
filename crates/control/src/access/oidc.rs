//! Bearer tokens of an OpenID Connect issuer: JSON web tokens (RFC 7519) that it signed for this
//! audience. Pure: keys and time are given.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use godwit_api::control::{Problem, ProblemCode, Role};
use jsonwebtoken::jwk::{Jwk, JwkSet, PublicKeyUse};
use jsonwebtoken::{Algorithm, DecodingKey, Validation, decode, decode_header};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::Caller;

/// Signatures that are accepted. Never `none`, and never one by a secret that both sides have (RFC
/// 8725, section 3.1).
const ALGORITHMS: [Algorithm; 3] = [Algorithm::RS256, Algorithm::ES256, Algorithm::EdDSA];
/// Clocks of issuer and manager differ by so much.
const CLOCKS_DIFFER_S: u64 = 60;
/// The longest name that stands in the audit log.
const MOST_NAME_BYTES: usize = 128;

/// Whose tokens are accepted, and what they say.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OidcRules {
    /// The issuer, as its tokens call it.
    pub issuer: String,
    /// What tokens for this manager are for.
    pub audience: String,
    /// The claim that says what the holder may do: a text or a list of them.
    #[serde(default = "default_role_claim")]
    pub role_claim: String,
    /// The claim that names the holder.
    #[serde(default = "default_name_claim")]
    pub name_claim: String,
    /// Which values of the role's claim make which role; none: the role's own name.
    #[serde(default)]
    pub roles: BTreeMap<Role, Vec<String>>,
    /// Certificates of the authorities that the issuer's own is checked by; none: the
    /// distribution's.
    #[serde(default)]
    pub authority: Option<PathBuf>,
}

fn default_role_claim() -> String {
    "godwit_role".to_owned()
}

fn default_name_claim() -> String {
    "sub".to_owned()
}

/// Why a token names nobody.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OidcRefusal {
    /// It is signed by a key that is not among those that are known: the issuer may have a new one.
    UnknownKey,
    /// It is not accepted.
    Refused(Problem),
}

#[derive(Deserialize)]
struct Claims {
    iss: String,
    aud: OneOrMany,
    sub: String,
    /// Seconds since 1970, of which some issuers tell fractions.
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

/// Whether a bearer's token has the shape of a JSON web token; ours have no dot.
#[must_use]
pub fn is_web_token(token: &str) -> bool {
    token.bytes().filter(|byte| *byte == b'.').count() == 2
}

/// Who holds a token.
///
/// # Errors
/// [`OidcRefusal`]: [`ProblemCode::Unauthenticated`] for a token that does not hold,
/// [`ProblemCode::Forbidden`] for a holder without a role.
pub fn caller(
    token: &str,
    keys: &JwkSet,
    rules: &OidcRules,
    now_unix_ms: u64,
) -> Result<Caller, OidcRefusal> {
    let header =
        decode_header(token).map_err(|error| refused(&format!("it can't be read: {error}")))?;
    if !ALGORITHMS.contains(&header.alg) {
        return Err(refused(
            "it is signed in a way that is not accepted (RS256, ES256 and EdDSA are)",
        ));
    }
    let key = key_of(keys, header.kid.as_deref(), header.alg)?;
    let key = DecodingKey::from_jwk(key).map_err(|_| refused("its key can't be used"))?;
    // The signature; what it says is judged below, by a time that is given.
    let mut validation = Validation::new(header.alg);
    validation.required_spec_claims.clear();
    (validation.validate_exp, validation.validate_aud) = (false, false);
    let claims = decode::<Claims>(token, &key, &validation)
        .map_err(|error| refused(&format!("it does not hold: {error}")))?
        .claims;
    check_claims(&claims, rules, now_unix_ms).map_err(refused)?;
    let holder = named(&claims, rules).map_err(OidcRefusal::Refused)?;
    Ok(Caller { until_unix_ms: Some(good_until_unix_ms(&claims)), ..holder })
}

fn refused(why: &str) -> OidcRefusal {
    let remedy =
        "take a new token from the issuer, for the audience that the manager's [oidc] names";
    let detail = format!("the token of the OIDC issuer is refused: {why}");
    OidcRefusal::Refused(Problem::new(ProblemCode::Unauthenticated, detail, remedy))
}

/// The key that a token names; one that names none is of the only key there is.
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
        return Err(refused("its key is for something else"));
    }
    Ok(key)
}

fn check_claims(claims: &Claims, rules: &OidcRules, now_unix_ms: u64) -> Result<(), &'static str> {
    let seconds = |ms: u64| ms as f64 / 1e3;
    let (now, differ) = (seconds(now_unix_ms), seconds(CLOCKS_DIFFER_S * 1000));
    if claims.iss != rules.issuer {
        return Err("it is of another issuer");
    }
    if !claims.aud.contains(&rules.audience) {
        return Err("it is for another audience");
    }
    if claims.exp + differ <= now {
        return Err("it has expired");
    }
    if claims.nbf.is_some_and(|begins| begins - differ > now) {
        return Err("it is not good yet");
    }
    Ok(())
}

/// When a token that holds now does so no more.
fn good_until_unix_ms(claims: &Claims) -> u64 {
    // Who says a number that is none of seconds means never.
    let expires = Duration::try_from_secs_f64(claims.exp).unwrap_or(Duration::MAX);
    let until = expires.saturating_add(Duration::from_secs(CLOCKS_DIFFER_S));
    u64::try_from(until.as_millis()).unwrap_or(u64::MAX)
}

/// The holder's name and the highest of its roles.
fn named(claims: &Claims, rules: &OidcRules) -> Result<Caller, Problem> {
    let named = claims.others.get(&rules.name_claim).and_then(Value::as_str);
    let name =
        if rules.name_claim == "sub" { claims.sub.as_str() } else { named.unwrap_or(&claims.sub) };
    if name.is_empty() || name.len() > MOST_NAME_BYTES || name.chars().any(char::is_control) {
        let detail = "the token's holder has a name that can't stand in the audit log";
        return Err(Problem::new(
            ProblemCode::Unauthenticated,
            detail,
            "set name_claim of [oidc] to another",
        ));
    }
    // In front: nobody of the issuer's has the name of a token of ours.
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
        let detail = format!("{name} has no role here by the claim {}", rules.role_claim);
        let remedy = "have the issuer give one, or name the holder's group under [oidc.roles]";
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
        let mut all = serde_json::json!({ "iss": "https://i", "aud": ["x", "godwit"], "sub": "u1", "exp": 1_000_100 });
        for (name, value) in changes.as_object().unwrap() {
            all[name] = value.clone();
        }
        serde_json::from_value(all).unwrap()
    }

    #[test]
    fn only_its_issuer_audience_and_time_are_good() {
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
    fn the_highest_role_counts_and_no_role_is_none() {
        let of = |rules: &OidcRules, changes: Value| named(&claims(&changes), rules);
        let caller =
            of(&rules(), serde_json::json!({ "godwit_role": ["viewer", "operator"] })).unwrap();
        assert_eq!(caller, Caller::named("oidc:u1", Role::Operator));
        for wrong in [serde_json::json!({}), serde_json::json!({ "godwit_role": "root" })] {
            assert_eq!(of(&rules(), wrong).unwrap_err().code, ProblemCode::Forbidden);
        }
        let groups: OidcRules = toml::from_str(
            "issuer = \"https://i\"\naudience = \"godwit\"\nrole_claim = \"groups\"\nname_claim = \"preferred_username\"\n\
            [roles]\nadmin = [\"vm-admins\"]\nviewer = [\"staff\"]",
        )
        .unwrap();
        let caller =
            of(&groups, serde_json::json!({ "groups": ["staff"], "preferred_username": "ann" }))
                .unwrap();
        assert_eq!(caller, Caller::named("oidc:ann", Role::Viewer));
        // A group that is called like a role is no role where groups are named.
        assert!(of(&groups, serde_json::json!({ "groups": ["admin"] })).is_err());
        assert!(
            of(&rules(), serde_json::json!({ "sub": "a\nb", "godwit_role": "admin" })).is_err()
        );
    }
}
