//! Screens and serial ports of VMs through the manager.

use bytes::Bytes;
use http::header::{
    CONNECTION, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_PROTOCOL, SEC_WEBSOCKET_VERSION, UPGRADE,
};
use http::{HeaderValue, Method, StatusCode};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::client::generate_key;
use tokio_tungstenite::tungstenite::protocol::{Role, WebSocketConfig};

use super::client::{ManagerClient, ManagerError};
use crate::client::{MAX_PICTURE_BYTES, PNG_MAGIC, segment};

/// Longest message of a manager, which sends pieces of 16 KiB.
const MAX_MESSAGE_BYTES: usize = 1 << 20;
/// Close code of a screen that continues in another connection, which the viewer opens at once.
pub const SCREEN_CONNECT_AGAIN: u16 = 4001;

/// Message of a [`VmSocket`].
pub type VmMessage = tokio_tungstenite::tungstenite::Message;
/// Connection to a screen or a serial port. Binary messages carry its bytes; those of a screen are
/// RFB, the protocol of VNC.
pub type VmSocket = WebSocketStream<TokioIo<Upgraded>>;

impl ManagerClient {
    /// Opens a VM's screen. The manager closes it with [`SCREEN_CONNECT_AGAIN`] when the VM moves.
    pub async fn screen(&self, vm: &str) -> Result<VmSocket, ManagerError> {
        let path = format!("/api/v1/vms/{}/screen", segment(vm));
        self.websocket(&path, "godwit.screen.v1").await
    }

    /// Opens a VM's serial port, from 1. It follows the VM when that moves.
    pub async fn console(&self, vm: &str, port: u32) -> Result<VmSocket, ManagerError> {
        let path = format!("/api/v1/vms/{}/console?port={port}", segment(vm));
        self.websocket(&path, "godwit.console.v1").await
    }

    async fn websocket(
        &self,
        path: &str,
        protocol: &'static str,
    ) -> Result<VmSocket, ManagerError> {
        let mut request = self.request(&Method::GET, path, Bytes::new(), None)?;
        let key = HeaderValue::from_str(&generate_key()).map_err(|error| self.protocol(&error))?;
        let headers = request.headers_mut();
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
        headers.insert(SEC_WEBSOCKET_VERSION, HeaderValue::from_static("13"));
        headers.insert(SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(protocol));
        headers.insert(SEC_WEBSOCKET_KEY, key);
        let response = self.client().exchange(request).await.map_err(|error| self.failed(error))?;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            return Err(self.refusal(response).await);
        }
        let stream = hyper::upgrade::on(response).await.map_err(|error| self.protocol(&error))?;
        let config = WebSocketConfig::default().max_message_size(Some(MAX_MESSAGE_BYTES));
        Ok(WebSocketStream::from_raw_socket(TokioIo::new(stream), Role::Client, Some(config)).await)
    }

    /// Takes a picture of a VM's screen; returns a PNG, by its first bytes.
    pub async fn screenshot(&self, vm: &str) -> Result<Bytes, ManagerError> {
        let path = format!("/api/v1/vms/{}/screenshot", segment(vm));
        let response = self.send(Method::GET, &path, Bytes::new()).await?;
        let picture = self.client().read(response.into_body(), MAX_PICTURE_BYTES).await;
        let picture = picture.map_err(|error| self.failed(error))?;
        match picture.starts_with(PNG_MAGIC) {
            true => Ok(picture),
            false => Err(self.protocol(&"the picture is not a PNG")),
        }
    }
}
