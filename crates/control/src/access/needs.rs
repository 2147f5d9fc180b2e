//! Required role of each request, and whether the audit log records it. Both depend on what the
//! request does, not on its method. A test compares the table with the routes.

use godwit_api::control::Role;
use http::Method;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need {
    /// Required role; `None`: everyone may send it, also unauthenticated callers.
    pub role: Option<Role>,
    /// Whether the audit log records it: it changes something, or has a cost for a guest, a host or
    /// a link.
    pub is_noted: bool,
}

const EVERYBODY: Need = Need { role: None, is_noted: false };
/// A joining host presents a join token.
const JOIN: Need = Need { role: None, is_noted: true };
const LOOK: Need = Need { role: Some(Role::Viewer), is_noted: false };
/// Output of guests is only for operators.
const READ: Need = Need { role: Some(Role::Operator), is_noted: false };
const WORK: Need = Need { role: Some(Role::Operator), is_noted: true };
/// Tokens and the audit log are only for admins.
const INSPECT: Need = Need { role: Some(Role::Admin), is_noted: false };
const GOVERN: Need = Need { role: Some(Role::Admin), is_noted: true };

/// Every request: its method, its path and its needs. A path with `?NAME` is the request with that
/// flag set.
const REQUESTS: &[(&str, &str, Need)] = &[
    ("GET", "/api/openapi.json", EVERYBODY),
    ("GET", "/healthz", EVERYBODY),
    ("GET", "/metrics", LOOK),
    ("GET", "/api/v1/alarms", LOOK),
    // It sends requests and mails to all receivers.
    ("POST", "/api/v1/alarms/test", WORK),
    ("POST", "/api/v1/alarms/{id}/acknowledge", WORK),
    ("GET", "/api/v1/audit", INSPECT),
    ("GET", "/api/v1/certificates", INSPECT),
    ("GET", "/api/v1/cluster", LOOK),
    ("GET", "/api/v1/cpu-baseline", LOOK),
    ("PUT", "/api/v1/cpu-baseline", GOVERN),
    ("DELETE", "/api/v1/cpu-baseline", GOVERN),
    ("GET", "/api/v1/cpu-baseline/vms", LOOK),
    ("GET", "/api/v1/datastores", LOOK),
    ("GET", "/api/v1/datastores/{datastore}", LOOK),
    // As a host: the handler checks that other changes than maintenance come from an admin.
    ("PATCH", "/api/v1/datastores/{datastore}", WORK),
    ("POST", "/api/v1/datastores/{datastore}/drain", WORK),
    ("GET", "/api/v1/datastore-drains", LOOK),
    ("GET", "/api/v1/datastore-drains/{id}", LOOK),
    ("DELETE", "/api/v1/datastore-drains/{id}", WORK),
    ("POST", "/api/v1/datastore-drains/{id}/undo", WORK),
    ("GET", "/api/v1/drains", LOOK),
    ("GET", "/api/v1/drains/{id}", LOOK),
    ("DELETE", "/api/v1/drains/{id}", WORK),
    ("POST", "/api/v1/drains/{id}/undo", WORK),
    ("GET", "/api/v1/events", LOOK),
    ("GET", "/api/v1/ha", LOOK),
    ("PUT", "/api/v1/ha", GOVERN),
    // It opens sessions of all fencing devices.
    ("POST", "/api/v1/ha/fencing/test", WORK),
    // A wrong confirmation lets VMs run twice.
    ("POST", "/api/v1/ha/hosts/{host}/confirm-off", WORK),
    ("GET", "/api/v1/hosts", LOOK),
    ("POST", "/api/v1/hosts", GOVERN),
    ("GET", "/api/v1/hosts/{host}", LOOK),
    // An operator who drains hosts may also end their maintenance. The handler checks that other
    // changes of a host come from an admin.
    ("PATCH", "/api/v1/hosts/{host}", WORK),
    ("DELETE", "/api/v1/hosts/{host}", GOVERN),
    // A QMP socket is a path on the host, and an adoption ends another program's QEMU.
    ("GET", "/api/v1/hosts/{host}/adoptions", LOOK),
    ("POST", "/api/v1/hosts/{host}/adoptions", GOVERN),
    ("POST", "/api/v1/hosts/{host}/adoptions/checks", GOVERN),
    ("GET", "/api/v1/hosts/{host}/adoptions/{id}", LOOK),
    ("DELETE", "/api/v1/hosts/{host}/adoptions/{id}", GOVERN),
    ("GET", "/api/v1/hosts/{host}/foreign-guests", LOOK),
    ("GET", "/api/v1/hosts/{host}/disks", LOOK),
    ("POST", "/api/v1/hosts/{host}/disks", WORK),
    ("DELETE", "/api/v1/hosts/{host}/disks", WORK),
    ("GET", "/api/v1/hosts/{host}/disks/info", LOOK),
    ("GET", "/api/v1/hosts/{host}/disks/kept", LOOK),
    ("PUT", "/api/v1/hosts/{host}/disks/kept", WORK),
    ("DELETE", "/api/v1/hosts/{host}/disks/kept", WORK),
    ("POST", "/api/v1/hosts/{host}/disks/resize", WORK),
    ("POST", "/api/v1/hosts/{host}/drain", WORK),
    ("POST", "/api/v1/hosts/{host}/imports", WORK),
    ("GET", "/api/v1/hosts/{host}/jobs", LOOK),
    ("GET", "/api/v1/hosts/{host}/jobs/{id}", LOOK),
    ("DELETE", "/api/v1/hosts/{host}/jobs/{id}", WORK),
    ("POST", "/api/v1/join", JOIN),
    ("GET", "/api/v1/join-tokens", INSPECT),
    ("POST", "/api/v1/join-tokens", GOVERN),
    ("DELETE", "/api/v1/join-tokens/{id}", GOVERN),
    ("GET", "/api/v1/journal", LOOK),
    ("GET", "/api/v1/limits", LOOK),
    ("PATCH", "/api/v1/limits", GOVERN),
    ("GET", "/api/v1/load", LOOK),
    ("GET", "/api/v1/me", LOOK),
    ("GET", "/api/v1/moves", LOOK),
    ("GET", "/api/v1/moves/{id}", LOOK),
    ("DELETE", "/api/v1/moves/{id}", WORK),
    ("GET", "/api/v1/moves/{id}/report", LOOK),
    ("GET", "/api/v1/moves/{id}/samples", LOOK),
    ("GET", "/api/v1/name-conflicts", LOOK),
    ("GET", "/api/v1/networks", LOOK),
    ("GET", "/api/v1/revocations", LOOK),
    ("PUT", "/api/v1/revocations/{serial}", GOVERN),
    ("GET", "/api/v1/rules", LOOK),
    ("POST", "/api/v1/rules", GOVERN),
    ("GET", "/api/v1/rules/{rule}", LOOK),
    ("DELETE", "/api/v1/rules/{rule}", GOVERN),
    ("GET", "/api/v1/tokens", INSPECT),
    ("POST", "/api/v1/tokens", GOVERN),
    ("DELETE", "/api/v1/tokens/{id}", GOVERN),
    ("GET", "/api/v1/top", LOOK),
    ("GET", "/api/v1/vms", LOOK),
    ("POST", "/api/v1/vms", WORK),
    ("GET", "/api/v1/vms/{vm}", LOOK),
    ("DELETE", "/api/v1/vms/{vm}", WORK),
    ("PATCH", "/api/v1/vms/{vm}", WORK),
    ("POST", "/api/v1/vms/{vm}/binding", WORK),
    ("POST", "/api/v1/vms/{vm}/clone", WORK),
    // A console connection also writes.
    ("GET", "/api/v1/vms/{vm}/console", WORK),
    ("POST", "/api/v1/vms/{vm}/export", WORK),
    ("POST", "/api/v1/vms/{vm}/freeze", WORK),
    ("GET", "/api/v1/vms/{vm}/guest", LOOK),
    ("GET", "/api/v1/vms/{vm}/images", LOOK),
    ("PUT", "/api/v1/vms/{vm}/link", WORK),
    ("POST", "/api/v1/vms/{vm}/drives", WORK),
    ("POST", "/api/v1/vms/{vm}/drives/move", WORK),
    ("POST", "/api/v1/vms/{vm}/nics", WORK),
    ("GET", "/api/v1/vms/{vm}/log", READ),
    ("POST", "/api/v1/vms/{vm}/moves", WORK),
    ("GET", "/api/v1/vms/{vm}/preflight", LOOK),
    // A dry run tracks the guest's writes and probes the lanes.
    ("GET", "/api/v1/vms/{vm}/preflight?predict", WORK),
    ("POST", "/api/v1/vms/{vm}/rename", WORK),
    ("POST", "/api/v1/vms/{vm}/reset", WORK),
    ("POST", "/api/v1/vms/{vm}/restart", WORK),
    // As a console.
    ("GET", "/api/v1/vms/{vm}/screen", WORK),
    ("GET", "/api/v1/vms/{vm}/screenshot", READ),
    ("GET", "/api/v1/vms/{vm}/snapshots", LOOK),
    ("POST", "/api/v1/vms/{vm}/snapshots", WORK),
    ("DELETE", "/api/v1/vms/{vm}/snapshots/{snapshot}", WORK),
    ("POST", "/api/v1/vms/{vm}/snapshots/{snapshot}/revert", WORK),
    ("POST", "/api/v1/vms/{vm}/start", WORK),
    ("POST", "/api/v1/vms/{vm}/stop", WORK),
    ("POST", "/api/v1/vms/{vm}/suspend", WORK),
    ("PUT", "/api/v1/vms/{vm}/template", WORK),
    ("POST", "/api/v1/vms/{vm}/thaw", WORK),
];

/// Returns the needs of a request; `query`: its decoded parameters. A request that is not in the
/// table needs the highest role.
#[must_use]
pub fn needed(method: &Method, path: &str, query: &[(String, String)]) -> Need {
    let bound = if *method == Method::HEAD { "GET" } else { method.as_str() };
    let of_path = || REQUESTS.iter().filter(|(_, template, _)| is_of(path, query, template));
    // A row with a flag follows the row without it, and applies if the flag is set.
    if let Some((.., need)) = of_path().rfind(|(method, ..)| *method == bound) {
        return *need;
    }
    // Callers who may use the path's other methods learn that it does not support this one.
    let looks = matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS);
    let others = of_path().map(|(.., need)| need.role).max();
    others.map_or(GOVERN, |role| Need { role, is_noted: !looks })
}

/// Returns whether a path matches a template, and the template's flag is set.
fn is_of(path: &str, query: &[(String, String)], template: &str) -> bool {
    let (template, flag) =
        template.split_once('?').map_or((template, None), |(path, flag)| (path, Some(flag)));
    let is_set = |flag: &str| query.iter().any(|(name, value)| name == flag && value != "false");
    let (mut parts, mut wanted) = (path.split('/'), template.split('/'));
    let is_path = loop {
        match (parts.next(), wanted.next()) {
            (None, None) => break true,
            (Some(part), Some(wanted)) if wanted.starts_with('{') && !part.is_empty() => {}
            (Some(part), Some(wanted)) if part == wanted => {}
            _ => break false,
        }
    };
    is_path && flag.is_none_or(is_set)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn need(method: &Method, path: &str) -> Need {
        needed(method, path, &[])
    }

    #[test]
    fn the_table_has_every_request() {
        let described = serde_json::to_value(crate::http::openapi()).unwrap();
        let mut routes: BTreeSet<(String, String)> = described["paths"]
            .as_object()
            .unwrap()
            .iter()
            .flat_map(|(path, methods)| {
                let methods = methods.as_object().unwrap().keys();
                methods.map(|method| (method.to_uppercase(), path.clone())).collect::<Vec<_>>()
            })
            .collect();
        // Routes outside the document: the document itself, metrics and health.
        let bare = include_str!("../http.rs").split(".route(\"").skip(1);
        routes.extend(
            bare.map(|rest| ("GET".to_owned(), rest.split('"').next().unwrap().to_owned())),
        );
        let without_flags = REQUESTS.iter().filter(|(_, path, _)| !path.contains('?'));
        let known: BTreeSet<_> = without_flags
            .map(|(method, path, _)| ((*method).to_owned(), (*path).to_owned()))
            .collect();
        assert_eq!(routes, known);
    }

    #[test]
    fn each_request_needs_its_row_and_no_method_lowers_that() {
        for (method, path, wanted) in REQUESTS.iter().copied() {
            let (template, flag) =
                path.split_once('?').map_or((path, None), |(path, flag)| (path, Some(flag)));
            let asked = template.replace(['{', '}'], "");
            let query: Vec<_> =
                flag.iter().map(|flag| ((*flag).to_owned(), "true".to_owned())).collect();
            let method: Method = method.parse().unwrap();
            assert_eq!(needed(&method, &asked, &query), wanted, "{method} {path}");
            if method == Method::GET {
                assert_eq!(needed(&Method::HEAD, &asked, &query), wanted, "{path}");
            }
            // Every change needs more than the role viewer, and is recorded.
            let changes = method != Method::GET && asked != "/api/v1/join";
            assert!(
                !changes || wanted.is_noted && wanted.role >= Some(Role::Operator),
                "{method} {path}"
            );
        }
    }

    #[test]
    fn requests_outside_the_table_need_the_highest_role() {
        for (method, path) in [
            (Method::GET, "/api/v1/something-new"),
            (Method::POST, "/api/v1/something-new"),
            (Method::GET, "/api/v1/vms/web/anything"),
            (Method::GET, "/api/v1/vms/"),
            (Method::GET, "//api/v1/vms"),
            (Method::GET, "/api/v1/vms/web/console/more"),
        ] {
            assert_eq!(need(&method, path), GOVERN, "{method} {path}");
        }
        // A known path with another method needs the role of the path's other methods.
        assert_eq!(need(&Method::PUT, "/healthz").role, None);
        assert_eq!(need(&Method::PUT, "/api/v1/vms").role, Some(Role::Operator));
        assert_eq!(need(&Method::OPTIONS, "/api/v1/tokens"), INSPECT);
    }

    #[test]
    fn every_form_of_a_prediction_needs_an_operator() {
        let path = "/api/v1/vms/web/preflight";
        let with = |pairs: &[(&str, &str)]| {
            let query: Vec<_> = pairs
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect();
            needed(&Method::GET, path, &query)
        };
        for look in [&[][..], &[("to", "b")], &[("predict", "false")]] {
            assert_eq!(with(look), LOOK);
        }
        for dry_run in [
            &[("predict", "true")][..],
            &[("predict", "false"), ("predict", "true")],
            &[("predict", "")],
        ] {
            assert_eq!(with(dry_run), WORK);
        }
    }
}
