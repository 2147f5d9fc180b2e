//! Which role a request needs, by its method and path. What is not thought of here needs the highest.

use godwit_api::control::Role;
use http::Method;

/// The role that a request needs; none: nobody is asked who they are.
#[must_use]
pub fn needed_role(method: &Method, path: &str) -> Option<Role> {
    let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
    match parts[..] {
        // What monitors and browsers ask before anybody is known. A joining host shows a token of its own kind.
        ["api", "openapi.json"] | ["healthz"] | ["api", "v1", "join"] => None,
        // Who reads a console types into it, and what guests write is for those who work with them.
        ["api", "v1", "vms", _, "console" | "log"] => Some(Role::Operator),
        // Tokens and what people did are not for everybody who may look.
        ["api", "v1", "tokens" | "join-tokens" | "audit", ..] => Some(Role::Admin),
        _ if *method == Method::GET || *method == Method::HEAD => Some(Role::Viewer),
        ["api", "v1", "vms" | "moves" | "drains", ..] | ["api", "v1", "hosts", _, "drain"] => {
            Some(Role::Operator)
        }
        // Who empties hosts also has them take VMs again. What else is changed of a host, the request itself says.
        ["api", "v1", "hosts", _] if *method == Method::PATCH => Some(Role::Operator),
        _ => Some(Role::Admin),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_request_needs_what_it_says() {
        for (method, path, role) in [
            (Method::GET, "/api/openapi.json", None),
            (Method::GET, "/healthz", None),
            (Method::POST, "/api/v1/join", None),
            (Method::GET, "/api/v1/vms", Some(Role::Viewer)),
            (Method::GET, "/api/v1/events", Some(Role::Viewer)),
            (Method::GET, "/api/v1/vms/web/console", Some(Role::Operator)),
            (Method::GET, "/api/v1/vms/web/log", Some(Role::Operator)),
            (Method::GET, "/metrics", Some(Role::Viewer)),
            (Method::POST, "/api/v1/vms", Some(Role::Operator)),
            (Method::DELETE, "/api/v1/vms/web", Some(Role::Operator)),
            (Method::POST, "/api/v1/vms/web/moves", Some(Role::Operator)),
            (Method::POST, "/api/v1/hosts/a/drain", Some(Role::Operator)),
            (Method::DELETE, "/api/v1/drains/d1", Some(Role::Operator)),
            (Method::POST, "/api/v1/hosts", Some(Role::Admin)),
            (Method::DELETE, "/api/v1/hosts/a", Some(Role::Admin)),
            (Method::PATCH, "/api/v1/hosts/a", Some(Role::Operator)),
            (Method::GET, "/api/v1/cpu-baseline", Some(Role::Viewer)),
            (Method::GET, "/api/v1/cpu-baseline/vms", Some(Role::Viewer)),
            (Method::PUT, "/api/v1/cpu-baseline", Some(Role::Admin)),
            (Method::DELETE, "/api/v1/cpu-baseline", Some(Role::Admin)),
            (Method::GET, "/api/v1/limits", Some(Role::Viewer)),
            (Method::PATCH, "/api/v1/limits", Some(Role::Admin)),
            (Method::GET, "/api/v1/rules", Some(Role::Viewer)),
            (Method::POST, "/api/v1/rules", Some(Role::Admin)),
            (Method::DELETE, "/api/v1/rules/db-apart", Some(Role::Admin)),
            (Method::GET, "/api/v1/tokens", Some(Role::Admin)),
            (Method::GET, "/api/v1/audit", Some(Role::Admin)),
            (Method::POST, "/api/v1/something-new", Some(Role::Admin)),
        ] {
            assert_eq!(needed_role(&method, path), role, "{method} {path}");
        }
    }
}
