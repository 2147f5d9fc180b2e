//! Tests of the configuration: what can be set, and what each error says.

use super::*;

const TLS_TO_HTTP: &str = "name = \"a\"\n\
        [tls]\nauthority = \"/c\"\ncertificate = \"/a\"\nkey = \"/k\"\n\
        [peers]\nb = \"http://10.0.0.1:7700\"";
const TLS_AND_NOT: &str = "name = \"a\"\ninsecure = true\n\
        [tls]\nauthority = \"/c\"\ncertificate = \"/a\"\nkey = \"/k\"";

const OTHER_LANE: &str = "name = \"a\"\nmigration_addresses = [\"10.0.0.1\"]\n\
        [limits.lanes]\n\"10.0.0.2\" = \"1gbit\"";

const POOL_TWICE: &str = "name = \"a\"\n\
        [[ceph]]\npools = [\"vms\"]\nconf = \"/c\"\nuser = \"a\"\nkey = \"/k\"\n\
        [[ceph]]\npools = [\"vms\"]\nconf = \"/d\"\nuser = \"a\"\nkey = \"/k\"";
const NO_MONITORS: &str = "name = \"a\"\n\
        [[ceph]]\npools = [\"vms\"]\nuser = \"a\"\nkey = \"/k\"";

fn parse(text: &str) -> Result<Config, ConfigError> {
    Config::parse(text, Path::new("/etc/godwit/agent.toml"))
}

#[test]
fn a_name_is_enough() {
    let config = parse("name = \"a\"").unwrap();
    assert_eq!(config.socket, Path::new(DEFAULT_SOCKET));
    assert_eq!(config.ram_dir(), Path::new("/run/godwit/ram"));
    assert_eq!(config.qemu, Path::new("qemu-system-x86_64"));
    assert!(config.listen.is_empty());
    assert_eq!(config.tracking.means, TrackingUse::Auto);
    assert_eq!(config.throttle.means, MeansUse::Auto);
    assert_eq!(config.references.spill_size, SpillSize::Auto);
    assert!(config.qemu_sandbox && config.qemu_user.is_none() && config.qemu_users.is_none());
    assert!(config.vm_dirs.iter().all(|dir| dir.is_absolute() && dir != Path::new("/")));
}

fn check_references(references: &ReferencesConfig) {
    assert_eq!((references.by, references.base_minutes), (ReferenceUse::Own, 5));
    assert_eq!(
        (references.base_memory.bytes(1), references.digest_memory.bytes()),
        (2 << 30, 8 << 20)
    );
    assert_eq!(BaseMemory::Auto.bytes(8 << 30), 2 << 30);
    assert_eq!(references.disk_digest_memory.bytes(), 16 << 20);
    assert_eq!(references.spill_dir.as_deref(), Some(Path::new("/data/retained")));
    assert_eq!(references.spill_size, SpillSize::Size(ByteSize::from_bytes(0)));
}

#[test]
fn everything_can_be_set() {
    let config = parse(
        r#"
            name = "a"
            listen = ["10.77.0.11:7700", "[fd77::11]:7700"]
            socket = "/run/a/agent.sock"
            state_dir = "/var/lib/a"
            run_dir = "/run/a"
            ram_dir = "/run/a/memory"
            migration_addresses = ["10.77.0.11", "fd77::11"]
            qemu = "/opt/qemu/bin/qemu-system-x86_64"
            qemu_users = "300000-365535"
            qemu_sandbox = false
            vm_dirs = ["/data/vms"]
            keep_source_disks = "forever"
            block_devices = ["/dev/vg0", "/dev/disk/by-partlabel/web"]
            tracker = "/opt/libgodwit_tracker.so"
            thin_pools = [{ group = "vg0", pool = "thin0" }]
            [firmware.uefi]
            code = "/opt/code.fd"
            variables = "/opt/vars.fd"
            [tls]
            authority = "/etc/godwit/ca.pem"
            certificate = "/etc/godwit/a.pem"
            key = "/etc/godwit/a.key"
            [limits]
            host = "5gbit"
            migration = "none"
            lanes = { "10.77.0.11" = "1gbit", "fd77::11" = "500mbit" }
            [references]
            use = "own"
            base_memory = "2GiB"
            base_minutes = 5
            digest_memory = "8MiB"
            disk_digest_memory = "16MiB"
            spill_dir = "/data/retained"
            spill_size = "none"
            [deltas]
            cache_memory = "16MiB"
            [ha]
            watchdog = "/dev/watchdog0"
            [tracking]
            means = "scans"
            [throttle]
            means = "quota"
            [policies.minimal-impact]
            throttle_above = 0.9
            [networks.lan]
            bridge = "br-lan"
            [peers]
            b = "https://10.77.0.12:7700"
            "#,
    )
    .unwrap();
    assert_eq!((config.listen.len(), config.block_devices.len()), (2, 2));
    assert_eq!(config.places_for_vms(), ["/data/vms", "lvm:vg0/thin0"].map(PathBuf::from));
    assert_eq!(config.firmware.uefi.as_ref().unwrap().code, Path::new("/opt/code.fd"));
    assert_eq!(config.qemu_users.map(|users| users.to_string()).as_deref(), Some("300000-365535"));
    assert!(!config.qemu_sandbox && config.vm_dirs == [Path::new("/data/vms")]);
    assert!(config.firmware.uefi_secure.is_none() && config.networks["lan"].bridge == "br-lan");
    assert_eq!(config.keep_source_disks, KeepTime::Forever);
    assert_eq!((config.limits.host.to_string(), config.limits.lanes.len()), ("5gbit".into(), 2));
    assert_eq!(config.ram_dir(), Path::new("/run/a/memory"));
    check_references(&config.references);
    assert_eq!(config.deltas.cache_memory.bytes(), 16 << 20);
    assert_eq!(config.ha.watchdog.as_deref(), Some(Path::new("/dev/watchdog0")));
    assert_eq!(config.tracking.means, TrackingUse::Scans);
    assert_eq!(config.throttle.means, MeansUse::Quota);
    assert_eq!(config.policies.of(Intent::MinimalImpact).throttle_above, Some(0.9));
    assert_eq!(config.policies.of(Intent::Auto), &PolicySettings::default());
}

#[test]
fn each_error_names_the_place_and_the_remedy() {
    let long = format!("name = \"a\"\nrun_dir = \"/{}\"", "x".repeat(100));
    let cases = [
        ("name = \"a\"\nlisten = [\"10.0.0.1\"]", "agent.toml:2:"),
        ("name = \"a\"\n\nstate-dir = \"/x\"", "agent.toml:3: unknown field `state-dir`"),
        ("name = \"a b\"", "name: \"a b\" is not a valid host name"),
        ("name = \"a\"\nqemu_users = \"all\"", "agent.toml:2: \"all\" is not a range of users"),
        (
            "name = \"a\"\nqemu_user = \"u\"\nqemu_users = \"300000-365535\"",
            "qemu_user: qemu_user sets one user",
        ),
        ("name = \"a\"\nvm_dirs = [\"x\"]", "vm_dirs: x is a relative path"),
        ("block_devices = [\"/dev\"]", "block_devices: /dev is not a device below /dev"),
        (
            "[[thin_pools]]\ngroup = \"vg0\"\npool = \"thin0\"",
            "thin_pools[0].group: block_devices does not have /dev/vg0",
        ),
        ("[[thin_pools]]\ngroup = \"vg0\"\npool = \"-f\"", "\"-f\" is not the name of a volume"),
        (
            "name = \"a\"\n[firmware.uefi-secure]\ncode = \"/c\"\nvariables = \"v\"",
            "firmware.uefi-secure: v is a relative path",
        ),
        (
            "name = \"a\"\nstate_dir = \"x\"",
            "state_dir: x is a relative path (write an absolute path)",
        ),
        ("name = \"a\"\ninsecure = true\n[peers]\nb = \"10.0.0.1:7700\"", "peers.b:"),
        (
            "name = \"a\"\ninsecure = true\n[peers]\na = \"http://10.0.0.1:7700\"",
            "cannot be its own peer",
        ),
        ("name = \"a\"\nlisten = [\"10.0.0.1:7700\"]", "tls: agents communicate with each other"),
        (
            "name = \"a\"\ninsecure = true\n[peers]\nb = \"https://10.0.0.1:7700\"",
            "peers.b: https://",
        ),
        (TLS_TO_HTTP, "peers.b: http://"),
        (TLS_AND_NOT, "insecure: this host has [tls] as well"),
        (
            "name = \"a\"\n[networks.lan]\nbridge = \"a-bridge-with-a-long-name\"",
            "networks.lan.bridge",
        ),
        ("name = \"a\"\n[limits]\nhost = \"0mbit\"", "agent.toml:3: a limit of zero"),
        ("name = \"a\"\n[limits]\nmigration = \"64kbit\"", "64kbit is too low"),
        ("name = \"a\"\n[limits.lanes]\n\"10.0.0.1\" = \"fast\"", "`fast` is not a limit"),
        (OTHER_LANE, "limits.lanes.\"10.0.0.2\": the address is not in"),
        ("name = \"a\"\n[references]\nuse = \"some\"", "unknown variant `some`"),
        ("name = \"a\"\n[ha]\nwatchdog = \"watchdog\"", "ha.watchdog: watchdog is a relative"),
        (POOL_TWICE, "ceph[1].pools: pool vms is named twice"),
        (NO_MONITORS, "ceph[0].monitors: either monitors or conf"),
        ("name = \"a\"\n[throttle]\nmeans = \"cpu\"", "unknown variant `cpu`"),
        (
            "name = \"a\"\n[policies.auto]\nthrottle_to = 2.0",
            "policies.auto.throttle_to: 2 is out of range",
        ),
        ("name = \"a\"\n[policies.quick]\nthrottle_to = 0.1", "unknown field `quick`"),
        ("name = \"a\"\n[references]\nbase_memory = \"much\"", "\"much\" is not a size"),
        (&long, "too long for the sockets"),
    ];
    for (text, expected) in cases {
        let error = parse(text).unwrap_err();
        let error = format!("{error} ({})", error.remedy());
        assert!(error.contains(expected), "{error:?} does not contain {expected:?}");
    }
    let alone = parse("").unwrap();
    assert_eq!((alone.name, alone.listen.len()), (godwit_pki::machine_name(), 0));
    assert!(Config::load_or_alone(Path::new("/nonexistent/agent.toml")).is_err());
    let error = Config::load(Path::new("/nonexistent/agent.toml")).unwrap_err();
    assert!(error.to_string().contains("/nonexistent/agent.toml"), "{error}");
    assert!(error.remedy().contains("--config"), "{}", error.remedy());
}
