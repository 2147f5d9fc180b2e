//! Client of a manager's socket. Keeps one connection and measures each response to its last byte.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use axum::body::Bytes;
use http::header::{CONTENT_TYPE, HOST};
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::net::UnixStream;

/// Connection to a manager, reopened after it has ended.
#[derive(Debug)]
pub struct Asker {
    socket: PathBuf,
    connection: Option<SendRequest<Full<Bytes>>>,
}

/// Response of the manager.
#[derive(Debug)]
pub struct Answered {
    pub status: StatusCode,
    pub body: Bytes,
    /// Time from the request to the last byte.
    pub took: Duration,
}

impl Answered {
    /// Parses the body.
    ///
    /// # Errors
    /// The response is a refusal or has an unexpected form.
    pub fn read<T: DeserializeOwned>(&self) -> Result<T> {
        if !self.status.is_success() {
            bail!("{}: {}", self.status, String::from_utf8_lossy(&self.body));
        }
        serde_json::from_slice(&self.body).context("the manager's response has an unexpected form")
    }
}

impl Asker {
    /// Creates a client of the manager with this socket.
    #[must_use]
    pub fn new(socket: &Path) -> Asker {
        Asker { socket: socket.to_owned(), connection: None }
    }

    async fn connection(&mut self) -> Result<&mut SendRequest<Full<Bytes>>> {
        if self.connection.as_ref().is_none_or(SendRequest::is_closed) {
            let stream = UnixStream::connect(&self.socket)
                .await
                .context("cannot connect to the manager's socket")?;
            let (sender, connection) = handshake(TokioIo::new(stream)).await?;
            tokio::spawn(connection);
            self.connection = Some(sender);
        }
        self.connection.as_mut().context("there is no connection")
    }

    /// Sends a request and returns any response.
    ///
    /// # Errors
    /// The manager does not answer.
    pub async fn ask(
        &mut self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Answered> {
        let request = Request::builder().method(method).uri(path).header(HOST, "localhost");
        let request = match body {
            Some(body) => request
                .header(CONTENT_TYPE, "application/json")
                .body(Full::new(Bytes::from(body.to_string())))?,
            None => request.body(Full::new(Bytes::new()))?,
        };
        let connection = self.connection().await?;
        connection.ready().await?;
        let began = Instant::now();
        let answer = connection.send_request(request).await?;
        let status = answer.status();
        let body = answer.into_body().collect().await?.to_bytes();
        Ok(Answered { status, body, took: began.elapsed() })
    }

    /// Sends `GET path` and parses the body.
    ///
    /// # Errors
    /// The manager refuses the request.
    pub async fn get<T: DeserializeOwned>(&mut self, path: &str) -> Result<T> {
        self.ask(Method::GET, path, None).await?.read().with_context(|| format!("GET {path}"))
    }

    /// Sends `POST path` and parses the body.
    ///
    /// # Errors
    /// The manager refuses the request.
    pub async fn post<T: DeserializeOwned>(&mut self, path: &str, body: &Value) -> Result<T> {
        self.ask(Method::POST, path, Some(body))
            .await?
            .read()
            .with_context(|| format!("POST {path}"))
    }

    /// Reads and discards a stream of events until it ends.
    ///
    /// # Errors
    /// The manager does not answer.
    pub async fn follow(&mut self, path: &str) -> Result<()> {
        let request = Request::get(path).header(HOST, "localhost").body(Full::new(Bytes::new()))?;
        let mut body = self.connection().await?.send_request(request).await?.into_body();
        while let Some(frame) = body.frame().await {
            frame?;
        }
        Ok(())
    }
}
