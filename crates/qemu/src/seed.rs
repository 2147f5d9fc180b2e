//! The disk from which cloud-init in a guest takes its settings (data source NoCloud): a FAT file
//! system labelled CIDATA. Pure: the same specification gives the same bytes on every host, so a
//! migration does not send the disk.
//!
//! The files are YAML, of which JSON is a subset (YAML 1.2; PyYAML, too, for printable ASCII). A
//! JSON writer quotes every string, so no value can end its place. [`crate::CloudInit`] admits
//! printable ASCII only, except in the operator's own user data, which is a file of its own.

use std::io::{self, Cursor, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use serde_json::{Map, Value, json};

use crate::spec::{CloudInit, GuestNetwork, ResolvedNic, ResolvedSpec};

/// Size of the disk. All files together have at most a quarter of it.
pub const SEED_BYTES: usize = 1 << 20;
/// Label of the file system, in the form of its directory entry.
const LABEL: [u8; 11] = *b"CIDATA     ";
/// Serial number of the file system.
const VOLUME_ID: u32 = 0x6764_7774;

/// A file of the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeedFile {
    pub name: &'static str,
    pub content: String,
}

/// Returns the files for cloud-init; none for a VM without settings for it.
#[must_use]
pub fn seed_files(spec: &ResolvedSpec) -> Vec<SeedFile> {
    let Some(settings) = &spec.cloud_init else { return Vec::new() };
    let hostname = settings.hostname.as_deref().unwrap_or(spec.name.as_str());
    let instance = if spec.uuid.is_nil() { spec.name.to_string() } else { spec.uuid.to_string() };
    let config = format!("#cloud-config\n{}", written(&cloud_config(settings, hostname)));
    let meta = written(&json!({ "instance-id": instance, "local-hostname": hostname }));
    let mut files = vec![SeedFile { name: "meta-data", content: meta }];
    match &settings.user_data {
        None => files.push(SeedFile { name: "user-data", content: config }),
        // User data has precedence over the data of a vendor.
        Some(data) => files.extend([
            SeedFile { name: "user-data", content: data.clone() },
            SeedFile { name: "vendor-data", content: config },
        ]),
    }
    // A NIC that comes while the guest runs must not change the disk that the guest has read.
    let nics: Vec<_> = spec.nics.iter().filter(|nic| nic.slot.is_none()).cloned().collect();
    if !nics.is_empty() {
        let content = written(&network_config(&nics, &settings.network));
        files.push(SeedFile { name: "network-config", content });
    }
    files
}

fn written(value: &Value) -> String {
    format!("{value:#}\n")
}

fn cloud_config(settings: &CloudInit, hostname: &str) -> Value {
    let mut config = json!({ "hostname": hostname, "manage_etc_hosts": true });
    if let Some(user) = &settings.user {
        config["user"] = json!(user);
    }
    if let Some(hash) = &settings.password_hash {
        config["password"] = json!(hash);
        config["chpasswd"] = json!({ "expire": false });
    }
    if !settings.ssh_keys.is_empty() {
        config["ssh_authorized_keys"] = json!(settings.ssh_keys);
    }
    config
}

/// Returns the network configuration, version 2: each interface is found by its hardware address.
fn network_config(nics: &[ResolvedNic], networks: &[GuestNetwork]) -> Value {
    let dhcp = GuestNetwork::default();
    let mut ethernets = Map::new();
    for (index, nic) in nics.iter().enumerate() {
        let network = networks.get(index).unwrap_or(&dhcp);
        let mut ethernet = json!({
            "match": { "macaddress": nic.mac.to_string() },
            "dhcp4": network.addresses.is_empty(),
        });
        if !network.addresses.is_empty() {
            ethernet["addresses"] = json!(network.addresses);
        }
        let route = |gateway: &std::net::IpAddr| {
            let to = if gateway.is_ipv4() { "0.0.0.0/0" } else { "::/0" };
            json!({ "to": to, "via": gateway })
        };
        if !network.gateways.is_empty() {
            ethernet["routes"] = network.gateways.iter().map(route).collect();
        }
        if !network.dns.is_empty() {
            ethernet["nameservers"] = json!({ "addresses": network.dns });
        }
        ethernets.insert(format!("nic{index}"), ethernet);
    }
    json!({ "version": 2, "ethernets": ethernets })
}

/// Returns the content of the disk; `None` for a VM without settings for cloud-init.
///
/// # Errors
/// The files do not fit, which [`crate::VmSpec::validate`] excludes.
pub fn seed_image(spec: &ResolvedSpec) -> io::Result<Option<Vec<u8>>> {
    let files = seed_files(spec);
    if files.is_empty() {
        return Ok(None);
    }
    let mut disk = Cursor::new(vec![0; SEED_BYTES]);
    let options = fatfs::FormatVolumeOptions::new()
        .fat_type(fatfs::FatType::Fat12)
        .volume_id(VOLUME_ID)
        .volume_label(LABEL);
    fatfs::format_volume(&mut disk, options)?;
    // Without the feature `chrono`, all times are the same.
    let volume = fatfs::FileSystem::new(&mut disk, fatfs::FsOptions::new())?;
    for SeedFile { name, content } in files {
        let mut file = volume.root_dir().create_file(name)?;
        file.write_all(content.as_bytes())?;
        file.flush()?;
    }
    volume.unmount()?;
    Ok(Some(disk.into_inner()))
}

/// Returns the disk as a file in memory that nobody can change, open to be read. It has secrets, so
/// it is on no file system, and it ends with the QEMU that inherits it.
///
/// # Errors
/// The kernel has no memory for it.
pub(crate) fn open_seed(spec: &ResolvedSpec) -> io::Result<Option<OwnedFd>> {
    let Some(image) = seed_image(spec)? else { return Ok(None) };
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut file = std::fs::File::from(rustix::fs::memfd_create("cloud-init", flags)?);
    file.write_all(&image)?;
    rustix::fs::fchmod(&file, Mode::RUSR)?;
    let seals = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(Some(rustix::fs::open(link, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?))
}

/// Reads the files of a disk, for tests and the lab.
///
/// # Errors
/// The disk is not one of [`seed_image`].
#[doc(hidden)]
pub fn read_seed(disk: impl Read + Write + Seek) -> io::Result<Vec<(String, String)>> {
    let volume = fatfs::FileSystem::new(disk, fatfs::FsOptions::new())?;
    let mut files = Vec::new();
    for entry in volume.root_dir().iter() {
        let entry = entry?;
        let mut content = String::new();
        let mut file = entry.to_file();
        file.seek(SeekFrom::Start(0))?;
        file.read_to_string(&mut content)?;
        files.push((entry.file_name(), content));
    }
    Ok(files)
}

#[cfg(test)]
mod tests;
