//! Configuration of the host's libvirt.

use std::path::PathBuf;

use serde::Deserialize;

/// How the host's libvirt is reached, if there is one.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LibvirtConfig {
    /// libvirt's command line: a path, or a name to look up in PATH.
    pub virsh: PathBuf,
    pub uri: String,
    /// Directory in which libvirt notes the processes of its guests; only root may write there.
    pub run_dir: PathBuf,
}

impl Default for LibvirtConfig {
    fn default() -> Self {
        LibvirtConfig {
            virsh: "virsh".into(),
            uri: "qemu:///system".to_owned(),
            run_dir: "/run/libvirt/qemu".into(),
        }
    }
}
