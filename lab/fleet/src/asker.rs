//! Asks a manager by its socket: one connection that is kept, and the time that each answer took, to its last byte.

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

/// A connection to a manager, made anew where it has ended.
#[derive(Debug)]
pub struct Asker {
    socket: PathBuf,
    connection: Option<SendRequest<Full<Bytes>>>,
}

/// What came back.
#[derive(Debug)]
pub struct Answered {
    pub status: StatusCode,
    pub body: Bytes,
    /// From the request to the last byte.
    pub took: Duration,
}

impl Answered {
    /// The body as what it is to be.
    ///
    /// # Errors
    /// It is a refusal, or something else.
    pub fn read<T: DeserializeOwned>(&self) -> Result<T> {
        if !self.status.is_success() {
            bail!("{}: {}", self.status, String::from_utf8_lossy(&self.body));
        }
        serde_json::from_slice(&self.body)
            .context("what the manager answers is not what was expected")
    }
}

impl Asker {
    /// Of the manager with this socket.
    #[must_use]
    pub fn new(socket: &Path) -> Asker {
        Asker { socket: socket.to_owned(), connection: None }
    }

    async fn connection(&mut self) -> Result<&mut SendRequest<Full<Bytes>>> {
        if self.connection.as_ref().is_none_or(SendRequest::is_closed) {
            let stream = UnixStream::connect(&self.socket).await.context("the manager's socket")?;
            let (sender, connection) = handshake(TokioIo::new(stream)).await?;
            tokio::spawn(connection);
            self.connection = Some(sender);
        }
        self.connection.as_mut().context("there is no connection")
    }

    /// Asks, whatever comes back.
    ///
    /// # Errors
    /// Nobody answers.
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

    /// `GET path`.
    ///
    /// # Errors
    /// It is refused.
    pub async fn get<T: DeserializeOwned>(&mut self, path: &str) -> Result<T> {
        self.ask(Method::GET, path, None).await?.read().with_context(|| format!("GET {path}"))
    }

    /// `POST path`.
    ///
    /// # Errors
    /// It is refused.
    pub async fn post<T: DeserializeOwned>(&mut self, path: &str, body: &Value) -> Result<T> {
        self.ask(Method::POST, path, Some(body))
            .await?
            .read()
            .with_context(|| format!("POST {path}"))
    }

    /// Reads an answer that has no end, and keeps nothing of it, until it ends all the same.
    ///
    /// # Errors
    /// Nobody answers.
    pub async fn follow(&mut self, path: &str) -> Result<()> {
        let request = Request::get(path).header(HOST, "localhost").body(Full::new(Bytes::new()))?;
        let mut body = self.connection().await?.send_request(request).await?.into_body();
        while let Some(frame) = body.frame().await {
            frame?;
        }
        Ok(())
    }
}
