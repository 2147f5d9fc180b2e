//! This machine's side of a screen: the socket at which a viewer connects, and the viewer.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::process::{Child, Command};

use crate::exit::{Exit, Failure};

/// A viewer's connection.
pub(super) trait Viewer: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Viewer for T {}

/// Socket at which viewers connect. A unix socket is removed in the end.
pub(super) enum Place {
    Socket { listener: UnixListener, path: PathBuf, _folder: Option<tempfile::TempDir> },
    Port { listener: TcpListener, address: SocketAddr },
}

/// A program of this machine that shows a screen.
pub(super) struct Program {
    pub(super) path: PathBuf,
    /// Whether it can connect to a unix socket.
    pub(super) takes_sockets: bool,
}

impl Place {
    /// Listens in a folder that only this user can enter.
    pub(super) fn private() -> Result<Place, Failure> {
        let only_ours = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        let folder =
            tempfile::Builder::new().prefix("godwit-screen-").permissions(only_ours).tempdir()?;
        let path = folder.path().join("vnc.sock");
        let listener =
            UnixListener::bind(&path).map_err(|error| failed(&path.display(), &error))?;
        Ok(Place::Socket { listener, path, _folder: Some(folder) })
    }

    /// Listens on a free port of this machine, which its other users can reach too.
    pub(super) async fn port() -> Result<Place, Failure> {
        Place::at((Ipv4Addr::LOCALHOST, 0).into()).await
    }

    /// Listens where the user says: at an address, or at the path of a socket.
    pub(super) async fn named(listen: &str) -> Result<Place, Failure> {
        if let Ok(address) = listen.parse() {
            return Place::at(address).await;
        }
        if !listen.contains('/') {
            return Err(Failure::usage(
                format!("cannot listen at {listen}: it is neither an address nor a path"),
                "use ADDRESS:PORT, such as 127.0.0.1:5901, or a path, such as ./web.sock",
            ));
        }
        let path = PathBuf::from(listen);
        let listener = UnixListener::bind(&path).map_err(|error| failed(&listen, &error))?;
        let place = Place::Socket { listener, path: path.clone(), _folder: None };
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&path, mode).map_err(|error| failed(&listen, &error))?;
        Ok(place)
    }

    async fn at(address: SocketAddr) -> Result<Place, Failure> {
        let listener =
            TcpListener::bind(address).await.map_err(|error| failed(&address, &error))?;
        let address = listener.local_addr()?;
        Ok(Place::Port { listener, address })
    }

    pub(super) async fn accept(&self) -> Result<Box<dyn Viewer>, Failure> {
        Ok(match self {
            Place::Socket { listener, .. } => Box::new(listener.accept().await?.0),
            Place::Port { listener, .. } => {
                let (stream, _) = listener.accept().await?;
                stream.set_nodelay(true)?;
                Box::new(stream)
            }
        })
    }

    pub(super) fn address(&self) -> String {
        match self {
            Place::Socket { path, .. } => path.display().to_string(),
            Place::Port { address, .. } => address.to_string(),
        }
    }

    /// Returns a command that connects to it.
    pub(super) fn hint(&self) -> String {
        match self {
            Place::Socket { path, .. } => format!("vncviewer {}", path.display()),
            Place::Port { address, .. } => {
                format!("vncviewer {}::{}", address.ip(), address.port())
            }
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Place::Socket { path, .. } = self {
            let _ = std::fs::remove_file(path);
        }
    }
}

fn failed(place: &dyn std::fmt::Display, error: &std::io::Error) -> Failure {
    let remedy = "use another address or path with --listen";
    Failure::new(Exit::Failure, format!("cannot listen at {place}: {error}"), remedy)
}

impl Program {
    /// Finds a viewer; none without a display.
    pub(super) fn find() -> Option<Program> {
        let has_display = ["WAYLAND_DISPLAY", "DISPLAY"]
            .into_iter()
            .any(|name| std::env::var_os(name).is_some_and(|value| !value.is_empty()));
        let path = std::env::var_os("PATH").filter(|_| has_display)?;
        Program::among(&std::env::split_paths(&path).collect::<Vec<_>>())
    }

    fn among(folders: &[PathBuf]) -> Option<Program> {
        let find = |name: &str| {
            folders.iter().map(|folder| folder.join(name)).find(|path: &PathBuf| path.is_file())
        };
        // TigerVNC's has this name beside the general one; other viewers of the general name take
        // no sockets.
        [("xtigervncviewer", true), ("remote-viewer", false), ("vncviewer", false)]
            .into_iter()
            .find_map(|(name, takes_sockets)| Some(Program { path: find(name)?, takes_sockets }))
    }

    /// Starts the viewer.
    pub(super) fn start(&self, place: &Place) -> Result<Child, Failure> {
        let mut command = Command::new(&self.path);
        match place {
            // Without the dialogues after the end of a connection: this command starts it again.
            Place::Socket { path, .. } => {
                command.args(["-ReconnectOnError=0", "-AlertOnFatalError=0"]).arg(path);
            }
            Place::Port { address, .. } if is_remote_viewer(&self.path) => {
                command.arg(format!("vnc://{address}"));
            }
            Place::Port { address, .. } => {
                command.arg(format!("{}::{}", address.ip(), address.port()));
            }
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true);
        command.spawn().map_err(|error| {
            let message = format!("cannot start {}: {error}", self.path.display());
            Failure::new(Exit::Failure, message, "connect with another viewer: see --listen")
        })
    }
}

fn is_remote_viewer(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name == "remote-viewer")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_viewer_that_takes_sockets_comes_first() {
        let folder = tempfile::tempdir().unwrap();
        let folders = [PathBuf::from("/nowhere"), folder.path().to_owned()];
        assert!(Program::among(&folders).is_none());
        for (name, takes_sockets) in
            [("vncviewer", false), ("remote-viewer", false), ("xtigervncviewer", true)]
        {
            std::fs::write(folder.path().join(name), "").unwrap();
            let found = Program::among(&folders).unwrap();
            assert_eq!((found.path, found.takes_sockets), (folders[1].join(name), takes_sockets));
        }
    }

    #[tokio::test]
    async fn a_place_is_an_address_or_a_path() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("web.sock");
        let place = Place::named(path.to_str().unwrap()).await.unwrap();
        assert!(place.hint().ends_with("web.sock") && path.exists());
        let mode = std::fs::metadata(&path).unwrap();
        assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode.permissions()) & 0o777, 0o600);
        drop(place);
        assert!(!path.exists());
        let place = Place::named("127.0.0.1:0").await.unwrap();
        assert!(place.hint().starts_with("vncviewer 127.0.0.1::"), "{}", place.hint());
        assert!(Place::named("web").await.is_err());
        let private = Place::private().unwrap();
        let folder = PathBuf::from(private.address()).parent().unwrap().to_owned();
        let mode = std::fs::metadata(&folder).unwrap();
        assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode.permissions()) & 0o777, 0o700);
        drop(private);
        assert!(!folder.exists());
    }
}
