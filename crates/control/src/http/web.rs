//! Files of the web console as the build made them. They contain no secrets, so every client may
//! read them; each manager serves its own. The console reads its data from the API, with a token.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use axum::body::Body;
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use http::header::{
    ACCEPT, ACCEPT_ENCODING, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_SECURITY_POLICY,
    CONTENT_TYPE, ETAG, IF_NONE_MATCH, REFERRER_POLICY, VARY, X_CONTENT_TYPE_OPTIONS,
};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use include_dir::{Dir, include_dir};

static BUILT: Dir<'static> = include_dir!("$CARGO_MANIFEST_DIR/../../web/dist");
static FILES: LazyLock<BTreeMap<String, File>> = LazyLock::new(|| files(&BUILT));

/// Content policy of the console's pages: only resources of this server, no inline code, no frames.
const POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data:; \
     connect-src 'self'; object-src 'none'; \
     base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
);
/// Cache policy of files that a browser revalidates each time; an unchanged file costs a short
/// answer.
const ASK_AGAIN: HeaderValue = HeaderValue::from_static("no-cache");
/// Cache policy of files with their content's digest in the name.
const NEVER_CHANGES: HeaderValue = HeaderValue::from_static("public, max-age=31536000, immutable");
/// Folder in which the build puts files with their content's digest in the name.
const HASHED: &str = "/assets/";
/// Page of all paths of the console. Its script selects the view from the path.
const PAGE: &str = "/index.html";

/// A file in plain and compressed forms, as the build made them.
#[derive(Debug)]
struct File {
    kind: &'static str,
    plain: Form,
    brotli: Option<Form>,
    gzip: Option<Form>,
}

/// One form of a file, with the tag by which a browser recognises it.
#[derive(Debug)]
struct Form {
    content: &'static [u8],
    tag: String,
}

/// Serves a file of the console if the path names one. All other requests go to the API.
pub(crate) async fn serve(request: Request, next: Next) -> Response {
    match found(&FILES, request.method(), request.uri().path(), request.headers()) {
        Found::File(path, file) => answer(path, file, request.method(), request.headers()),
        Found::Missing => with_rules(status(StatusCode::NOT_FOUND)),
        Found::NoFile => next.run(request).await,
    }
}

/// Result of looking up a path.
#[derive(Debug)]
enum Found<'f> {
    File(&'f str, &'f File),
    /// A file of an older build. A page in its place would be mistaken for the file.
    Missing,
    /// A path of the API.
    NoFile,
}

fn found<'f>(
    files: &'f BTreeMap<String, File>,
    method: &Method,
    path: &str,
    headers: &HeaderMap,
) -> Found<'f> {
    if !matches!(*method, Method::GET | Method::HEAD) {
        return Found::NoFile;
    }
    let of = |path: &str| files.get_key_value(path).map(|(path, file)| Found::File(path, file));
    let first = path.trim_start_matches('/').split('/').next().unwrap_or_default();
    match first {
        "api" | "metrics" | "healthz" => Found::NoFile,
        "" => of(PAGE).unwrap_or(Found::NoFile),
        _ if path.starts_with(HASHED) => of(path).unwrap_or(Found::Missing),
        _ => of(path)
            .or_else(|| wants_page(headers).then(|| of(PAGE)).flatten())
            .unwrap_or(Found::NoFile),
    }
}

/// Returns whether the client asks for a page to display. Browsers accept HTML for nothing else.
fn wants_page(headers: &HeaderMap) -> bool {
    let accepted = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
    accepted.flat_map(|value| value.split(',')).any(|kind| {
        kind.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("text/html")
    })
}

fn answer(path: &str, file: &File, method: &Method, headers: &HeaderMap) -> Response {
    let (form, encoding) = file.form(headers);
    let tag = HeaderValue::from_str(&form.tag).unwrap_or(HeaderValue::from_static("\"\""));
    let is_known =
        headers.get_all(IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok()).any(
            |value| {
                value.split(',').any(
                |known| matches!(known.trim().trim_start_matches("W/"), known if known == form.tag),
            )
            },
        );
    let mut response = if is_known {
        status(StatusCode::NOT_MODIFIED)
    } else {
        let mut response = Response::new(match *method {
            Method::HEAD => Body::empty(),
            _ => Body::from(form.content),
        });
        let own = response.headers_mut();
        own.insert(CONTENT_TYPE, HeaderValue::from_static(file.kind));
        if let Some(encoding) = encoding {
            own.insert(CONTENT_ENCODING, HeaderValue::from_static(encoding));
        }
        response
    };
    let own = response.headers_mut();
    own.insert(ETAG, tag);
    own.insert(VARY, HeaderValue::from_name(ACCEPT_ENCODING));
    own.insert(CACHE_CONTROL, if path.starts_with(HASHED) { NEVER_CHANGES } else { ASK_AGAIN });
    with_rules(response)
}

fn status(status: StatusCode) -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = status;
    response
}

/// Adds the security headers for browsers.
fn with_rules(mut response: Response) -> Response {
    const OPENER_POLICY: HeaderName = HeaderName::from_static("cross-origin-opener-policy");
    const RESOURCE_POLICY: HeaderName = HeaderName::from_static("cross-origin-resource-policy");
    let headers = response.headers_mut();
    headers.insert(CONTENT_SECURITY_POLICY, POLICY);
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers.insert(OPENER_POLICY, HeaderValue::from_static("same-origin"));
    headers.insert(RESOURCE_POLICY, HeaderValue::from_static("same-origin"));
    response
}

impl File {
    /// Returns the smallest accepted form, and the name of its encoding.
    fn form(&self, headers: &HeaderMap) -> (&Form, Option<&'static str>) {
        let compressed = [(&self.brotli, "br"), (&self.gzip, "gzip")];
        let usable = compressed.into_iter().filter(|(_, encoding)| accepts(headers, encoding));
        let smallest =
            usable.filter_map(|(form, encoding)| Some((form.as_ref()?, encoding))).next();
        smallest.map_or((&self.plain, None), |(form, encoding)| (form, Some(encoding)))
    }
}

/// Returns whether an encoding is accepted by name (RFC 9110, section 12.5.3).
fn accepts(headers: &HeaderMap, encoding: &str) -> bool {
    let values = headers.get_all(ACCEPT_ENCODING).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|one| {
        let (name, weight) = one.split_once(';').unwrap_or((one, ""));
        let weight = weight.trim().strip_prefix("q=").and_then(|weight| weight.parse::<f32>().ok());
        name.trim().eq_ignore_ascii_case(encoding) && weight.unwrap_or(1.0) > 0.0
    })
}

/// Returns all files of a build by the paths under which they are served.
fn files(built: &'static Dir<'static>) -> BTreeMap<String, File> {
    let mut contents = BTreeMap::new();
    let mut folders = vec![built];
    while let Some(folder) = folders.pop() {
        folders.extend(folder.dirs());
        let of = folder
            .files()
            .filter_map(|file| Some((file.path().to_str()?.to_owned(), file.contents())));
        contents.extend(of);
    }
    let form = |path: &str, suffix: &str| {
        let content: &'static [u8] = contents.get(&format!("{path}{suffix}"))?;
        // Each form has its own tag, because its bytes differ.
        let digest = blake3::hash(content).to_hex();
        Some(Form { content, tag: format!("\"{}{suffix}\"", &digest[..20]) })
    };
    let is_compressed = |path: &str| [".br", ".gz"].iter().any(|suffix| path.ends_with(suffix));
    let plain = contents.keys().filter(|path| !is_compressed(path));
    plain
        .filter_map(|path| {
            let file = File {
                kind: kind(path),
                plain: form(path, "")?,
                brotli: form(path, ".br"),
                gzip: form(path, ".gz"),
            };
            Some((format!("/{path}"), file))
        })
        .collect()
}

fn kind(path: &str) -> &'static str {
    match path.rsplit_once('.').map(|(_, suffix)| suffix) {
        Some("html") => "text/html; charset=utf-8",
        Some("js" | "mjs") => "text/javascript; charset=utf-8",
        Some("css") => "text/css; charset=utf-8",
        Some("json" | "map") => "application/json",
        Some("webmanifest") => "application/manifest+json",
        Some("svg") => "image/svg+xml",
        Some("png") => "image/png",
        Some("ico") => "image/x-icon",
        Some("woff2") => "font/woff2",
        Some("txt") => "text/plain; charset=utf-8",
        _ => "application/octet-stream",
    }
}

#[cfg(test)]
mod tests {
    use godwit_api::control::ProblemCode;

    use super::*;
    use crate::http::tests::{Managed, request};

    fn form(content: &'static [u8], tag: &str) -> Form {
        Form { content, tag: format!("\"{tag}\"") }
    }

    fn built() -> BTreeMap<String, File> {
        let script = File {
            kind: kind("a.js"),
            plain: form(b"plain", "p"),
            brotli: Some(form(b"br", "b")),
            gzip: Some(form(b"gz", "g")),
        };
        let page =
            File { kind: kind("index.html"), plain: form(b"page", "i"), brotli: None, gzip: None };
        BTreeMap::from([(PAGE.to_owned(), page), ("/assets/main-1a2b.js".to_owned(), script)])
    }

    fn headers(of: &[(HeaderName, &'static str)]) -> HeaderMap {
        of.iter().map(|(name, value)| (name.clone(), HeaderValue::from_static(value))).collect()
    }

    /// Returns what is served at a path: the path of a file, `missing` or `api`.
    fn served<'f>(
        files: &'f BTreeMap<String, File>,
        method: &Method,
        path: &str,
        accept: &'static str,
    ) -> &'f str {
        match found(files, method, path, &headers(&[(ACCEPT, accept)])) {
            Found::File(path, _) => path,
            Found::Missing => "missing",
            Found::NoFile => "api",
        }
    }

    #[test]
    fn files_pages_and_api_paths_are_distinguished() {
        const BROWSER: &str = "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8";
        let files = built();
        for (method, path, accept, expected) in [
            (Method::GET, "/", "*/*", PAGE),
            (Method::GET, "/index.html", "*/*", PAGE),
            (Method::HEAD, "/vms/web", BROWSER, PAGE),
            (Method::GET, "/vms/web", BROWSER, PAGE),
            (Method::GET, "/vms/web", "application/json, */*", "api"),
            (Method::POST, "/vms/web", BROWSER, "api"),
            (Method::GET, "/api/v1/vms", BROWSER, "api"),
            (Method::GET, "/api", BROWSER, "api"),
            (Method::GET, "/metrics", BROWSER, "api"),
            (Method::GET, "/assets/main-1a2b.js", "*/*", "/assets/main-1a2b.js"),
            (Method::GET, "/assets/main-0000.js", BROWSER, "missing"),
            (Method::GET, "/../etc/passwd", BROWSER, PAGE),
        ] {
            assert_eq!(served(&files, &method, path, accept), expected, "{method} {path} {accept}");
        }
    }

    #[tokio::test]
    async fn the_smallest_accepted_form_is_sent_and_revalidated() {
        let files = built();
        let (path, file) = files.get_key_value("/assets/main-1a2b.js").unwrap();
        for (accepted, content, encoding) in [
            ("gzip, deflate, br", "br", Some("br")),
            ("gzip;q=1.0, br;q=0", "gz", Some("gzip")),
            ("identity", "plain", None),
        ] {
            let sent = answer(path, file, &Method::GET, &headers(&[(ACCEPT_ENCODING, accepted)]));
            assert_eq!(
                sent.headers().get(CONTENT_ENCODING).map(|one| one.to_str().unwrap()),
                encoding
            );
            assert_eq!(sent.headers()[CACHE_CONTROL], NEVER_CHANGES);
            assert_eq!(sent.headers()[VARY], "accept-encoding");
            let tag = sent.headers()[ETAG].clone();
            assert_eq!(axum::body::to_bytes(sent.into_body(), 99).await.unwrap(), content);
            let mut again = headers(&[(ACCEPT_ENCODING, accepted)]);
            again.insert(IF_NONE_MATCH, tag);
            assert_eq!(answer(path, file, &Method::GET, &again).status(), StatusCode::NOT_MODIFIED);
        }
        let other = headers(&[(ACCEPT_ENCODING, "br"), (IF_NONE_MATCH, "\"g\"")]);
        assert_eq!(answer(path, file, &Method::GET, &other).status(), StatusCode::OK);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn the_console_is_served_without_a_token_and_with_a_content_policy() {
        let managed = Managed::begin().await;
        let send = async |path| {
            use tower::ServiceExt;
            managed.app.clone().oneshot(request(Method::GET, path, None, None)).await.unwrap()
        };
        let page = send("/").await;
        assert_eq!(page.status(), StatusCode::OK);
        let policy = page.headers()[CONTENT_SECURITY_POLICY].to_str().unwrap();
        assert!(
            policy.contains("default-src 'self'") && policy.contains("frame-ancestors 'none'"),
            "{policy}"
        );
        assert!(!policy.contains("unsafe"), "{policy}");
        assert_eq!(page.headers()[CACHE_CONTROL], ASK_AGAIN);
        assert_eq!(page.headers()[X_CONTENT_TYPE_OPTIONS], "nosniff");
        assert_eq!(send("/assets/gone-0000.js").await.status(), StatusCode::NOT_FOUND);
        let unknown = managed.ask(Method::GET, "/nothing", None, None).await;
        assert_eq!(unknown.problem(), ProblemCode::Unauthenticated);
    }

    /// Inline code would be blocked by the policy, which only shows in a browser.
    #[test]
    fn the_page_has_no_inline_scripts_and_styles() {
        let page = std::str::from_utf8(FILES[PAGE].plain.content).unwrap();
        let scripts = page.split("<script").skip(1);
        for script in scripts {
            let tag = script.split('>').next().unwrap();
            assert!(tag.contains("src="), "an inline script: <script{tag}>");
        }
        assert!(
            !page.contains("<style") && !page.contains(" style=") && !page.contains(" onload="),
            "{page}"
        );
    }
}
