//! LVM's program: looks at a thin pool, makes a thin volume in it, marks it and removes it.
//!
//! It runs as root, with fixed arguments. What it prints is bounded, and so is the time for which
//! it is waited for. A look is ended then. A change is not: LVM suspends devices meanwhile, and
//! nothing resumes them if it is killed. It goes on, and the next look shows what it did. Only the
//! end of the agent can end it: its next message meets a closed pipe then.
//! Arguments, selections and answers are those of LVM 2.03.16.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use godwit_qemu::ThinPool;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::Command;

/// Longest time for a look. It waits while another program changes the volume group.
const LOOK_LIMIT: Duration = Duration::from_secs(20);
/// Longest time for which a change is waited for.
const CHANGE_LIMIT: Duration = Duration::from_secs(60);
/// Longest answer that is read.
const MOST_ANSWER_BYTES: u64 = 4 << 20;
/// Longest reason of an error.
const MOST_REASON_CHARS: usize = 300;
/// Longest UUID of LVM: it has 32 characters and 6 hyphens.
const MOST_UUID_BYTES: usize = 64;
/// What is looked at of each volume of a group.
const COLUMNS: &str =
    "vg_uuid,lv_name,lv_uuid,lv_attr,lv_size,pool_lv,lv_tags,data_percent,metadata_percent";
/// Begin of the tag of a volume that is being made or removed, and is no VM's.
pub(crate) const ARRIVING_TAG: &str = "godwit-arriving-";

/// Why LVM did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LvmError {
    /// It is not installed, or cannot be started.
    #[error("cannot start lvm: {0}")]
    CannotStart(#[from] io::Error),
    /// It takes too long.
    #[error("lvm did not end within {} s", limit.as_secs())]
    Late { limit: Duration },
    /// It refuses.
    #[error("lvm refuses: {0}")]
    Refused(String),
    /// Its answer is not what was asked for.
    #[error("cannot read the answer of lvm: it is not the expected JSON")]
    Answer,
}

impl LvmError {
    /// What the operator can do about it.
    #[must_use]
    pub(crate) fn remedy(&self) -> &'static str {
        match self {
            LvmError::CannotStart(_) => "install lvm2 on that host",
            LvmError::Late { .. } => "see which program locks the volume group, and `dmsetup info`",
            LvmError::Refused(_) | LvmError::Answer => "see `lvs -a` and `vgs` on that host",
        }
    }
}

/// What a look has shown of a volume group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    /// The thin pool; absent: the group has none of that name.
    pub(crate) pool: Option<PoolState>,
    /// All volumes of the group but the pool, in order.
    pub(crate) volumes: Vec<ThinVolume>,
}

/// A thin pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PoolState {
    pub(crate) group_uuid: String,
    pub(crate) uuid: String,
    pub(crate) total_bytes: u64,
    /// Bytes that its volumes have taken; absent: it is not active.
    pub(crate) used_bytes: Option<u64>,
    /// Hundredths of a per cent of its metadata that are used.
    pub(crate) metadata_used: Option<u64>,
    /// Whether it makes blocks zero before a volume gets them.
    pub(crate) zeroes: bool,
    /// Whether it takes writes: it has not failed, and is not out of space for data or metadata.
    pub(crate) takes_writes: bool,
}

/// A volume of the group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ThinVolume {
    pub(crate) name: String,
    pub(crate) uuid: String,
    pub(crate) bytes: u64,
    /// Whether it is a thin volume in the pool.
    pub(crate) is_in_pool: bool,
    pub(crate) tags: Vec<String>,
}

impl ThinVolume {
    /// Returns its tag that says that it is no VM's.
    pub(crate) fn arriving_tag(&self) -> Option<&str> {
        self.tags.iter().find(|tag| tag.starts_with(ARRIVING_TAG)).map(String::as_str)
    }
}

/// LVM's program.
#[derive(Clone, Debug)]
pub(crate) struct Lvm {
    program: PathBuf,
}

impl Lvm {
    /// Returns the program with a path, or with a name to look up in PATH.
    pub(crate) fn new(program: &Path) -> Lvm {
        Lvm { program: program.to_owned() }
    }

    /// Looks at a pool and the volumes of its group.
    ///
    /// # Errors
    /// See [`LvmError`].
    pub(crate) async fn look(&self, pool: &ThinPool) -> Result<Seen, LvmError> {
        let arguments = [
            "lvs",
            "--reportformat",
            "json",
            "--units",
            "b",
            "--nosuffix",
            "--options",
            COLUMNS,
            pool.group(),
        ];
        let mut command = self.command(&arguments);
        command.kill_on_drop(true);
        let asked = answer_of(&mut command);
        let late = LvmError::Late { limit: LOOK_LIMIT };
        let answer = tokio::time::timeout(LOOK_LIMIT, asked).await.map_err(|_| late)??;
        let answer: Value = serde_json::from_str(&answer).map_err(|_| LvmError::Answer)?;
        seen_in(&answer, pool).ok_or(LvmError::Answer)
    }

    /// Makes a thin volume of at least so many bytes, which LVM rounds up to an extent, with a tag.
    ///
    /// # Errors
    /// See [`LvmError`]; it refuses a name that is taken.
    pub(crate) async fn create(
        &self,
        pool: &ThinPool,
        (name, bytes): (&str, u64),
        tag: &str,
    ) -> Result<(), LvmError> {
        let (size, pool) = (format!("{bytes}b"), pool.to_string());
        let arguments = [
            "lvcreate",
            "--yes",
            "--wipesignatures",
            "n",
            "--addtag",
            tag,
            "--virtualsize",
            &size,
            "--name",
            name,
            "--thin",
            &pool,
        ];
        self.change(&arguments).await
    }

    /// Adds a tag to the volume with this name and UUID.
    ///
    /// # Errors
    /// See [`LvmError`].
    pub(crate) async fn tag(
        &self,
        pool: &ThinPool,
        volume: &ThinVolume,
        tag: &str,
    ) -> Result<(), LvmError> {
        self.change_one(&["lvchange", "--addtag", tag], pool, volume, None).await
    }

    /// Removes a tag from the volume with this name and UUID.
    ///
    /// # Errors
    /// See [`LvmError`].
    pub(crate) async fn untag(
        &self,
        pool: &ThinPool,
        volume: &ThinVolume,
        tag: &str,
    ) -> Result<(), LvmError> {
        self.change_one(&["lvchange", "--deltag", tag], pool, volume, None).await
    }

    /// Removes the volume with this name and UUID, if it still has a tag. LVM refuses one that
    /// something has open.
    ///
    /// # Errors
    /// See [`LvmError`].
    pub(crate) async fn remove(
        &self,
        pool: &ThinPool,
        volume: &ThinVolume,
        tag: &str,
    ) -> Result<(), LvmError> {
        self.change_one(&["lvremove", "--yes"], pool, volume, Some(tag)).await
    }

    /// Changes a volume. LVM compares its UUID and its tag under the lock of the group: another one
    /// may have got its name since the last look.
    async fn change_one(
        &self,
        verb: &[&str],
        pool: &ThinPool,
        volume: &ThinVolume,
        tag: Option<&str>,
    ) -> Result<(), LvmError> {
        let is_tagged = tag.map(|tag| format!(" && lv_tags={{\"{tag}\"}}")).unwrap_or_default();
        let select = format!("lv_uuid=\"{}\"{is_tagged}", volume.uuid);
        let name = format!("{}/{}", pool.group(), volume.name);
        let arguments: Vec<&str> =
            verb.iter().copied().chain(["--select", &select, &name]).collect();
        self.change(&arguments).await
    }

    async fn change(&self, arguments: &[&str]) -> Result<(), LvmError> {
        let mut command = self.command(arguments);
        // A task of its own reads what the program prints, also when nobody waits any more.
        let done = tokio::spawn(async move { answer_of(&mut command).await });
        match tokio::time::timeout(CHANGE_LIMIT, done).await {
            Ok(Ok(answer)) => answer.map(drop),
            Ok(Err(ended)) => Err(io::Error::other(ended).into()),
            Err(_) => Err(LvmError::Late { limit: CHANGE_LIMIT }),
        }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(arguments).current_dir("/").env_clear().env("LC_ALL", "C");
        // It complains about files of its caller that are not its own.
        command.env("LVM_SUPPRESS_FD_WARNINGS", "1");
        command.envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }
}

async fn answer_of(command: &mut Command) -> Result<String, LvmError> {
    let mut child = command.spawn()?;
    let (out, err) = (child.stdout.take(), child.stderr.take());
    let (out, err) = tokio::join!(read(out), read(err));
    match child.wait().await?.success() {
        true => Ok(out),
        false => Err(LvmError::Refused(reason_of(&err))),
    }
}

async fn read(from: Option<impl AsyncRead + Unpin>) -> String {
    let mut bytes = Vec::new();
    if let Some(mut from) = from {
        // What cannot be read is not there.
        let _ = (&mut from).take(MOST_ANSWER_BYTES).read_to_end(&mut bytes).await;
        // A pipe that is closed would end the program in the middle of a change.
        let _ = tokio::io::copy(&mut from, &mut tokio::io::sink()).await;
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Returns the reason in an error: its last line that is no warning.
fn reason_of(text: &str) -> String {
    let lines = || text.lines().map(str::trim).filter(|line| !line.is_empty());
    let reason = lines().rfind(|line| !line.starts_with("WARNING"));
    let reason = reason.or_else(|| lines().next_back()).unwrap_or("no reason");
    reason.chars().filter(|c| !c.is_control()).take(MOST_REASON_CHARS).collect()
}

/// Reads an answer; `None`: it has another form.
fn seen_in(answer: &Value, pool: &ThinPool) -> Option<Seen> {
    let mut seen = Seen { pool: None, volumes: Vec::new() };
    for report in answer["report"].as_array()? {
        for row in report["lv"].as_array()? {
            // The kind, the state, and what else is set, one letter each (lvs(8)).
            let attributes = row["lv_attr"].as_str()?;
            let (name, uuid) = (row["lv_name"].as_str()?, uuid_in(&row["lv_uuid"])?);
            let bytes = row["lv_size"].as_str()?.parse().ok()?;
            if name == pool.pool() && attributes.starts_with('t') {
                let used = hundredths_in(&row["data_percent"]);
                seen.pool = Some(PoolState {
                    group_uuid: uuid_in(&row["vg_uuid"])?,
                    uuid,
                    total_bytes: bytes,
                    used_bytes: used.and_then(|used| part_of(bytes, used)),
                    metadata_used: hundredths_in(&row["metadata_percent"]),
                    zeroes: attributes.chars().nth(7) == Some('z'),
                    // Failed, out of data space, metadata read only.
                    takes_writes: !matches!(attributes.chars().nth(8), Some('F' | 'D' | 'M')),
                });
                continue;
            }
            let tags = row["lv_tags"].as_str().unwrap_or_default().split(',');
            seen.volumes.push(ThinVolume {
                name: name.to_owned(),
                uuid,
                bytes,
                is_in_pool: attributes.starts_with('V') && row["pool_lv"] == pool.pool(),
                tags: tags.filter(|tag| is_tag(tag)).map(str::to_owned).collect(),
            });
        }
    }
    Some(seen)
}

/// Reads a UUID, which later is a part of an argument.
fn uuid_in(value: &Value) -> Option<String> {
    let is_good = |c: char| c.is_ascii_alphanumeric() || c == '-';
    let text = value.as_str().filter(|text| text.chars().all(is_good))?;
    ((1..=MOST_UUID_BYTES).contains(&text.len())).then(|| text.to_owned())
}

/// Whether a tag can be one of this program's.
fn is_tag(tag: &str) -> bool {
    !tag.is_empty() && tag.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
}

/// Reads a percentage with two digits after the point, as hundredths; `None`: it is not known.
fn hundredths_in(value: &Value) -> Option<u64> {
    let (whole, part) = value.as_str()?.split_once('.')?;
    let part: u64 = part.get(..2)?.parse().ok()?;
    let sum = whole.parse::<u64>().ok()?.checked_mul(100)?.checked_add(part)?;
    (sum <= 10_000).then_some(sum)
}

/// Returns so many hundredths of a per cent of a size.
fn part_of(bytes: u64, hundredths: u64) -> Option<u64> {
    u64::try_from(u128::from(bytes) * u128::from(hundredths) / 10_000).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    const UUID: &str = "Yq2s3R-8Z1k-aaaa-bbbb-cccc-dddd-EEEEEE";

    fn thin0() -> ThinPool {
        ThinPool::of(Path::new("lvm:vg0/thin0")).unwrap()
    }

    fn row(name: &str, attributes: &str) -> Value {
        json!({
            "vg_uuid": "G-1", "lv_name": name, "lv_uuid": UUID, "lv_attr": attributes,
            "lv_size": "1000", "pool_lv": "", "lv_tags": "", "data_percent": "",
            "metadata_percent": "",
        })
    }

    fn report(rows: &[Value]) -> Value {
        json!({ "report": [{ "lv": rows }] })
    }

    #[test]
    fn a_pool_and_the_volumes_beside_it_are_read() {
        let mut pool = row("thin0", "twi-aotz--");
        pool["data_percent"] = "12.34".into();
        pool["metadata_percent"] = "80.01".into();
        let mut thin = row("web", "Vwi-a-tz--");
        thin["pool_lv"] = "thin0".into();
        thin["lv_tags"] = "backup,godwit-arriving-07,a\"b".into();
        let mut elsewhere = row("db", "Vwi-a-tz--");
        elsewhere["pool_lv"] = "thin1".into();
        let seen = seen_in(&report(&[pool, thin, elsewhere, row("root", "-wi-ao----")]), &thin0());
        let seen = seen.unwrap();
        let state = seen.pool.unwrap();
        assert_eq!((state.total_bytes, state.used_bytes), (1000, Some(123)));
        assert_eq!((state.metadata_used, state.zeroes), (Some(8001), true));
        assert!(state.takes_writes);
        for attributes in ["twi-aotzF-", "twi-aotzD-", "twi-aotzM-"] {
            let seen = seen_in(&report(&[row("thin0", attributes)]), &thin0()).unwrap();
            assert!(!seen.pool.unwrap().takes_writes, "{attributes}");
        }
        let names: Vec<_> = seen.volumes.iter().map(|one| (&*one.name, one.is_in_pool)).collect();
        assert_eq!(names, [("web", true), ("db", false), ("root", false)]);
        assert_eq!(seen.volumes[0].arriving_tag(), Some("godwit-arriving-07"));
        assert_eq!(seen.volumes[0].tags.len(), 2, "a tag that could be a selection is left out");
        // A pool that is not active, and whose new blocks keep what they had.
        let idle = seen_in(&report(&[row("thin0", "twi---t---")]), &thin0()).unwrap().pool.unwrap();
        assert_eq!((idle.used_bytes, idle.metadata_used, idle.zeroes), (None, None, false));
        // A usual volume with the name of the pool is none.
        assert_eq!(seen_in(&report(&[row("thin0", "-wi-a-----")]), &thin0()).unwrap().pool, None);
        assert_eq!(seen_in(&report(&[]), &thin0()).unwrap().pool, None);
    }

    #[test]
    fn an_answer_of_another_form_is_none() {
        let odd = |key: &str, value: Value| {
            let mut row = row("thin0", "twi-aotz--");
            row[key] = value;
            report(&[row])
        };
        for bad in [
            json!(7),
            json!({}),
            json!({ "report": 7 }),
            json!({ "report": [{ "pv": [] }] }),
            report(&[json!(7)]),
            odd("lv_uuid", json!("\" || lv_name=~.*")),
            odd("lv_uuid", json!("")),
            odd("lv_uuid", json!("x".repeat(65))),
            odd("lv_size", json!("-1")),
            odd("lv_size", json!(1000)),
            odd("vg_uuid", json!(null)),
        ] {
            assert_eq!(seen_in(&bad, &thin0()), None, "{bad}");
        }
    }

    proptest! {
        #[test]
        fn a_percentage_is_at_most_all(text in "[0-9.%-]{0,12}", bytes: u64) {
            if let Some(used) = hundredths_in(&json!(text)) {
                prop_assert!(used <= 10_000);
                prop_assert!(part_of(bytes, used).unwrap() <= bytes);
            }
        }
    }

    proptest! {
        #[test]
        fn what_is_read_of_any_answer_is_bounded(
            (name, attributes) in ("[a-z0-9-]{0,6}", "[Vt][a-z-]{0,9}"),
            (uuid, bytes) in ("[A-Za-z0-9\" =|&-]{0,80}", "[0-9.-]{0,24}"),
            (tags, percent) in (".{0,20}", ".{0,8}"),
        ) {
            let mut row = row(&name, &attributes);
            for (key, value) in [("lv_uuid", uuid), ("lv_size", bytes), ("lv_tags", tags),
                ("data_percent", percent)]
            {
                row[key] = value.into();
            }
            let Some(seen) = seen_in(&report(&[row]), &thin0()) else { return Ok(()) };
            for volume in &seen.volumes {
                let is_plain = |text: &str| {
                    text.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
                };
                prop_assert!(is_plain(&volume.uuid) && volume.uuid.len() <= MOST_UUID_BYTES);
                prop_assert!(volume.tags.iter().all(|tag| is_plain(tag)));
            }
            if let Some(pool) = &seen.pool {
                prop_assert!(pool.used_bytes.is_none_or(|used| used <= pool.total_bytes));
            }
        }
    }

    #[test]
    fn an_error_has_a_reason() {
        let text = "  WARNING: sum of sizes\n  Volume group \"vg0\" not found\n  WARNING: more\n\n";
        assert_eq!(reason_of(text), "Volume group \"vg0\" not found");
        assert_eq!(reason_of("WARNING: one\n"), "WARNING: one");
        assert_eq!(reason_of(""), "no reason");
        assert_eq!(reason_of(&"x".repeat(1000)).len(), MOST_REASON_CHARS);
    }

    #[tokio::test]
    async fn a_program_that_prints_too_much_is_not_ended() {
        let mut command = Command::new("sh");
        command.args(["-c", "head -c 5000000 /dev/zero && echo changed >&2; exit 5"]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let error = answer_of(&mut command).await.unwrap_err();
        assert_eq!(error.to_string(), "lvm refuses: changed");
    }

    #[tokio::test]
    async fn a_host_without_lvm_is_an_error_that_says_what_to_install() {
        let error = Lvm::new(Path::new("/nonexistent/lvm")).look(&thin0()).await.unwrap_err();
        assert!(error.to_string().starts_with("cannot start lvm: "), "{error}");
        assert_eq!(error.remedy(), "install lvm2 on that host");
        // It ends well and prints nothing.
        let error = Lvm::new(Path::new("true")).look(&thin0()).await.unwrap_err();
        assert!(matches!(error, LvmError::Answer), "{error}");
    }
}
