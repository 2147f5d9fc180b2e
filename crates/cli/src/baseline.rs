//! Implements `godwit control cpu-baseline`.

use std::collections::BTreeSet;

use godwit_api::control::{
    BaselineHost, BaselineVm, CpuBaseline, CpuBaselineChange, CpuBaselineInfo, ManagerClient,
    SetCpuBaseline,
};

use crate::args::{CpuBaselineCommand, SetBaselineArgs};
use crate::exit::Failure;
use crate::output::{Output, fields, table};

pub(crate) async fn run(
    command: CpuBaselineCommand,
    manager: &ManagerClient,
    output: Output,
) -> Result<(), Failure> {
    match command {
        CpuBaselineCommand::Show { vms: false } => {
            let info = manager.cpu_baseline().await?;
            output.result(&info, || show(&info))
        }
        CpuBaselineCommand::Show { vms: true } => {
            let (info, vms) = (manager.cpu_baseline().await?, manager.cpu_baseline_vms().await?);
            let both = serde_json::json!({ "baseline": info, "must_restart": vms });
            output.result(&both, || format!("{}\n{}", show(&info), vm_table(&vms)))
        }
        CpuBaselineCommand::Set(SetBaselineArgs { model, plan, without }) => {
            let change = manager.set_cpu_baseline(&SetCpuBaseline { model, without }, plan).await?;
            output.result(&change, || change_text(&change))
        }
        CpuBaselineCommand::Clear => {
            manager.clear_cpu_baseline().await?;
            output.result(&serde_json::json!({ "cleared": true }), || {
                "the cluster has no CPU baseline".to_owned()
            })
        }
    }
}

fn level(level: Option<&String>) -> String {
    level.cloned().unwrap_or_else(|| "-".to_owned())
}

fn of_baseline(baseline: &CpuBaseline) -> Vec<(&'static str, String)> {
    let mut rows = vec![
        ("baseline", baseline.cpu_model.clone()),
        ("requested", baseline.asked.clone()),
        ("level", level(baseline.level.as_ref())),
        ("set by", baseline.set_by.clone()),
    ];
    let without = baseline.without.join(", ");
    rows.extend((!without.is_empty()).then_some(("without", without)));
    rows
}

fn show(info: &CpuBaselineInfo) -> String {
    let mut rows = match &info.baseline {
        Some(baseline) => of_baseline(baseline),
        None => {
            vec![("baseline", "none: each VM has the CPU of its specification".to_owned())]
        }
    };
    rows.extend(info.baseline.as_ref().map(|_| ("must restart", vms(info.must_restart_count))));
    match (&info.common, &info.no_common) {
        (Some(common), _) => rows.push(("common cpu", common.cpu_model.clone())),
        (None, why) => rows.push(("common cpu", why.clone().unwrap_or_default())),
    }
    let names: Vec<&str> = info.named.iter().map(|named| named.name.as_str()).collect();
    rows.extend((!names.is_empty()).then(|| ("by name", names.join(", "))));
    let hosts: Vec<_> = info.hosts.iter().map(host_row).collect();
    let head = ["host", "baseline", "vendor", "by", "level", "lacks"];
    format!("{}\n{}", fields(&rows), table(&head, &hosts))
}

fn vms(count: u64) -> String {
    if count == 1 { "1 vm".to_owned() } else { format!("{count} vms") }
}

fn host_row(host: &BaselineHost) -> Vec<String> {
    let text = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
    vec![
        host.host.clone(),
        host.fit.map_or("-", |fit| fit.name()).to_owned(),
        text(&host.vendor),
        text(&host.accel),
        level(host.level.as_ref()),
        host.why.clone().unwrap_or_else(|| listed(&host.lacks)),
    ]
}

fn listed(features: &BTreeSet<String>) -> String {
    features.iter().map(String::as_str).collect::<Vec<_>>().join(" ")
}

fn vm_table(vms: &[BaselineVm]) -> String {
    let rows: Vec<_> = vms
        .iter()
        .map(|vm| vec![vm.vm.clone(), vm.host.clone(), vm.cpu_model.clone(), vm.why.clone()])
        .collect();
    table(&["vm", "host", "cpu model", "reason"], &rows)
}

fn change_text(change: &CpuBaselineChange) -> String {
    let mut rows = of_baseline(&change.baseline);
    let state = match (&change.refused, change.set) {
        (_, true) => "set: VMs that are created from now on get it".to_owned(),
        (None, false) => "plan: nothing is set".to_owned(),
        (Some(why), false) => format!("plan: it would be refused: {why}"),
    };
    rows.push(("state", state));
    rows.push(("must restart", vms(change.must_restart_count)));
    rows.extend((!change.unknown.is_empty()).then(|| ("not reported", change.unknown.join(", "))));
    let mut text = fields(&rows);
    if !change.falls_short.is_empty() {
        let short = change.falls_short.iter();
        let hosts: Vec<_> =
            short.map(|host| vec![host.host.clone(), listed(&host.lacks)]).collect();
        text = format!("{text}\n{}", table(&["host below the baseline", "lacks"], &hosts));
    }
    if !change.must_restart.is_empty() {
        text = format!("{text}\n{}", vm_table(&change.must_restart));
    }
    text
}
