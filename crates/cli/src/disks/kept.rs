//! Implements `godwit disk kept`: images that stay at a host after their disks have moved.

use std::path::Path;

use godwit_api::{KeptDisk, KeptDisks};
use serde_json::json;

use crate::args::KeptCommand;
use crate::exit::Failure;
use crate::output::{Output, table};
use crate::target::{HostTarget, absolute};
use crate::units::{byte_count, utc};

pub(super) async fn run(
    command: Option<KeptCommand>,
    target: &HostTarget,
    output: Output,
) -> Result<(), Failure> {
    match command {
        None => {
            let list = target.kept_disks().await?;
            output.result(&list, || text(&list))
        }
        Some(KeptCommand::Remove { path }) => {
            let path = absolute(&path)?;
            target.remove_kept_disk(&path).await?;
            output.result(&json!({ "removed": path }), || {
                format!("disk {} is removed", path.display())
            })
        }
        Some(KeptCommand::Keep { path }) => {
            let kept = target.keep_disk(&absolute(&path)?).await?;
            output
                .result(&kept, || format!("disk {} stays until it is removed", kept.path.display()))
        }
    }
}

impl HostTarget {
    async fn kept_disks(&self) -> Result<KeptDisks, Failure> {
        Ok(match self {
            HostTarget::Agent(agent) => agent.kept_disks().await?,
            HostTarget::Manager(manager, host) => manager.kept_disks(host).await?,
        })
    }

    async fn keep_disk(&self, path: &Path) -> Result<KeptDisk, Failure> {
        Ok(match self {
            HostTarget::Agent(agent) => agent.keep_disk(path).await?,
            HostTarget::Manager(manager, host) => manager.keep_disk(host, path).await?,
        })
    }

    async fn remove_kept_disk(&self, path: &Path) -> Result<(), Failure> {
        match self {
            HostTarget::Agent(agent) => agent.remove_kept_disk(path).await?,
            HostTarget::Manager(manager, host) => manager.remove_kept_disk(host, path).await?,
        }
        Ok(())
    }
}

/// Formats the list, and below it why images stay whose time is over.
fn text(list: &KeptDisks) -> String {
    let rows: Vec<_> = list.disks.iter().map(row).collect();
    let mut text = table(&["path", "vm", "moved to", "used", "kept until"], &rows);
    for disk in &list.disks {
        if let Some(why) = &disk.waits {
            text.push_str(&format!("{} stays: {why}\n", disk.path.display()));
        }
    }
    text
}

fn row(disk: &KeptDisk) -> Vec<String> {
    vec![
        disk.path.display().to_string(),
        disk.vm.clone(),
        disk.to.clone(),
        byte_count(disk.used_bytes),
        disk.until_unix_ms.map_or_else(|| "removed by request".to_owned(), utc),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_says_why_an_image_stays() {
        let disk = KeptDisk {
            path: "/srv/web.raw".into(),
            vm: "web".to_owned(),
            to: "b".to_owned(),
            moved_to: "/ssd/web.raw".into(),
            used_bytes: 3 << 30,
            since_unix_ms: 0,
            until_unix_ms: Some(86_400_000),
            waits: Some("host b does not answer".to_owned()),
        };
        let kept = KeptDisk {
            path: "/srv/db.raw".into(),
            until_unix_ms: None,
            waits: None,
            ..disk.clone()
        };
        let text = text(&KeptDisks { disks: vec![kept, disk] });
        for part in [
            "1970-01-02 00:00:00",
            "3.0 GiB",
            "removed by request",
            "/srv/web.raw stays: host b does not answer",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(!text.contains("/srv/db.raw stays"), "{text}");
    }
}
