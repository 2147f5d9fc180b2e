//! Implements `godwit control ha`.

use godwit_api::control::{
    FencingTest, HaHostStatus, HaOwnVmStatus, HaPhase, HaSettings, HaShortfall, HaStatus,
    HaVmStatus, ManagerClient,
};
use godwit_api::json_name;

use crate::args::{FencingCommand, HaCommand, OnOff, SetHaArgs};
use crate::exit::{Exit, Failure};
use crate::output::{Output, fields, table};
use crate::units::byte_count;

pub(crate) async fn run(
    command: HaCommand,
    manager: &ManagerClient,
    output: Output,
) -> Result<Exit, Failure> {
    match command {
        HaCommand::Show => {
            let status = manager.ha().await?;
            output.result(&status, || render(&status))?;
        }
        HaCommand::Set(options) => {
            let settings = changed(&options, manager.ha().await?.settings);
            let status = manager.set_ha(&settings).await?;
            output.result(&status, || render(&status))?;
        }
        HaCommand::ConfirmOff { host, term } => {
            let status = manager.confirm_off(&host, term).await?;
            output.result(&status, || {
                format!("term {term} of host {host} has ended\n\n{}", render(&status))
            })?;
        }
        HaCommand::Fencing { command: FencingCommand::Test } => {
            let test = manager.test_fencing().await?;
            output.result(&test, || power(&test))?;
            if test.hosts.values().any(|state| state != "on" && state != "off") {
                return Ok(Exit::Failure);
            }
        }
    }
    Ok(Exit::Ok)
}

/// Returns the settings with those that the options name.
fn changed(options: &SetHaArgs, settings: HaSettings) -> HaSettings {
    HaSettings {
        enabled: options.enabled.map_or(settings.enabled, |enabled| enabled == OnOff::On),
        failures: options.failures.unwrap_or(settings.failures),
        admission: options.admission.unwrap_or(settings.admission),
    }
}

fn render(status: &HaStatus) -> String {
    let HaStatus { settings, hosts, vms, own, own_problems, shortfall } = status;
    let mut rows = vec![
        ("ha", if settings.enabled { "on" } else { "off" }.to_owned()),
        ("failures at once", settings.failures.to_string()),
        ("admission", json_name(&settings.admission)),
        ("protected vms", vms.len().to_string()),
    ];
    rows.extend(shortfall.as_ref().map(|shortfall| ("shortfall", lacking(shortfall))));
    rows.extend(own_problems.iter().map(|why| ("problem", or_dash(Some(why)))));
    let mut text = fields(&rows);
    if !settings.enabled {
        text.push_str(
            "\nno host has a term, and the manager restarts no VM elsewhere. To change that:\n  \
             godwit control ha set --enabled on\n",
        );
    }
    let doubtful = hosts.iter().filter(|host| host.phase == HaPhase::Doubtful);
    for HaHostStatus { host, term, .. } in doubtful {
        text.push_str(&format!(
            "\nhost {host} does not respond. Make sure that it has no power, then run:\n  \
             godwit control ha confirm-off {host} --term {term}\n"
        ));
    }
    text.extend(own.iter().filter_map(doubt_of_own));
    if !hosts.is_empty() {
        let heads =
            ["host", "term", "state", "watchdog", "fencing", "heartbeats", "renewed", "problem"];
        let rows: Vec<_> = hosts.iter().map(host_row).collect();
        text = format!("{text}\n{}", table(&heads, &rows));
    }
    if !vms.is_empty() {
        let rows: Vec<_> = vms.iter().map(vm_row).collect();
        let heads = ["protected vm", "host", "priority", "restart", "problem"];
        text = format!("{text}\n{}", table(&heads, &rows));
    }
    if !own.is_empty() {
        let rows: Vec<_> = own.iter().map(own_row).collect();
        let heads =
            ["vm of agents", "term", "standing", "host", "watched by", "datastore", "problem"];
        text = format!("{text}\n{}", table(&heads, &rows));
    }
    text
}

/// Returns what an operator has to do about a doubtful VM that agents restart; `None`: nothing.
fn doubt_of_own(own: &HaOwnVmStatus) -> Option<String> {
    let HaOwnVmStatus { vm, term, host, confirm_at, .. } = own;
    let at = confirm_at.as_ref()?;
    let former = host.as_ref().map(|host| format!(" {}", or_dash(Some(host)))).unwrap_or_default();
    Some(format!(
        "\nthe host{former} of VM {vm} does not respond. Make sure that it has no power, then \
         run:\n  godwit host ha confirm-off {at} {vm} --term {term}\n"
    ))
}

fn lacking(shortfall: &HaShortfall) -> String {
    format!(
        "after the failure of {}, {} of memory is missing for {}",
        shortfall.hosts.join(" and "),
        byte_count(shortfall.memory_bytes),
        shortfall.vms.join(", ")
    )
}

fn host_row(host: &HaHostStatus) -> Vec<String> {
    let (term, state) = match host.term {
        0 => ("-".to_owned(), "no term".to_owned()),
        term => (term.to_string(), json_name(&host.phase)),
    };
    let state = if host.rests { "in maintenance".to_owned() } else { state };
    let yes = |yes: bool| if yes { "yes" } else { "no" }.to_owned();
    let datastores = match &host.datastores[..] {
        [] => "-".to_owned(),
        names => names.join(" "),
    };
    vec![
        host.host.clone(),
        term,
        state,
        yes(host.watchdog),
        yes(host.fencing),
        datastores,
        host.heard_ms_ago.map_or_else(|| "never".to_owned(), ago),
        or_dash(host.problem.as_ref()),
    ]
}

fn vm_row(vm: &HaVmStatus) -> Vec<String> {
    vec![
        vm.vm.clone(),
        vm.host.clone(),
        json_name(&vm.priority),
        or_dash(vm.restart.as_ref()),
        or_dash(vm.problem.as_ref()),
    ]
}

fn own_row(own: &HaOwnVmStatus) -> Vec<String> {
    let watched_by = match &own.watched_by[..] {
        [] => "-".to_owned(),
        names => names.join(" "),
    };
    vec![
        own.vm.clone(),
        own.term.to_string(),
        json_name(&own.standing),
        or_dash(own.host.as_ref()),
        watched_by,
        own.datastore.clone(),
        or_dash(own.problem.as_ref()),
    ]
}

fn power(test: &FencingTest) -> String {
    if test.hosts.is_empty() {
        return "no fencing device is configured (docs/ha.md)".to_owned();
    }
    let row = |(host, state): (&String, &String)| vec![host.clone(), state.clone()];
    table(&["host", "power"], &test.hosts.iter().map(row).collect::<Vec<_>>())
}

/// Formats a text that may be absent. A host may report anything.
fn or_dash(text: Option<&String>) -> String {
    text.map_or_else(|| "-".to_owned(), |text| text.replace(|c: char| c.is_control(), " "))
}

/// Formats the time since something happened.
pub(crate) fn ago(ms: u64) -> String {
    format!("{}.{} s ago", ms / 1000, ms % 1000 / 100)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use godwit_api::OwnStanding;
    use godwit_api::control::AdmissionPolicy;
    use godwit_qemu::{RestartPriority, Uuid};

    use super::*;

    fn host(name: &str, term: u64, phase: HaPhase) -> HaHostStatus {
        HaHostStatus {
            host: name.to_owned(),
            term,
            phase,
            watchdog: true,
            fencing: false,
            datastores: vec!["fast".to_owned()],
            heard_ms_ago: Some(14_250),
            rests: false,
            problem: None,
        }
    }

    #[test]
    fn a_host_that_rests_is_in_maintenance() {
        let resting = HaHostStatus { rests: true, ..host("a", 3, HaPhase::Over) };
        assert_eq!(host_row(&resting)[..3], ["a", "3", "in maintenance"]);
        assert_eq!(host_row(&host("a", 3, HaPhase::Over))[2], "over");
    }

    #[test]
    fn only_named_settings_change() {
        let before = HaSettings { enabled: true, failures: 2, admission: AdmissionPolicy::Refuse };
        let none = SetHaArgs { enabled: None, failures: Some(3), admission: None };
        assert_eq!(changed(&none, before), HaSettings { failures: 3, ..before });
        let off = SetHaArgs { enabled: Some(OnOff::Off), failures: None, admission: None };
        assert_eq!(changed(&off, before), HaSettings { enabled: false, ..before });
    }

    #[test]
    fn a_doubtful_host_comes_with_the_command_that_ends_the_doubt() {
        let vm = HaVmStatus {
            vm: "web".to_owned(),
            host: "a".to_owned(),
            priority: RestartPriority::High,
            problem: None,
            restart: Some("waits for host a".to_owned()),
        };
        let status = HaStatus {
            settings: HaSettings { enabled: true, ..HaSettings::default() },
            hosts: vec![host("a", 3, HaPhase::Doubtful), host("b", 0, HaPhase::Over)],
            vms: vec![vm],
            own: Vec::new(),
            own_problems: Vec::new(),
            shortfall: None,
        };
        let text = render(&status);
        for part in [
            "godwit control ha confirm-off a --term 3",
            "doubtful",
            "14.2 s ago",
            "no term",
            "high",
            "waits for host a",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
        assert!(!text.contains("confirm-off b"), "{text}");
    }

    #[test]
    fn a_shortfall_names_hosts_memory_and_vms() {
        let shortfall = HaShortfall {
            hosts: vec!["a".to_owned(), "b".to_owned()],
            vms: vec!["db".to_owned()],
            memory_bytes: 4 << 30,
        };
        let status = HaStatus {
            settings: HaSettings { enabled: true, ..HaSettings::default() },
            hosts: Vec::new(),
            vms: Vec::new(),
            own: Vec::new(),
            own_problems: Vec::new(),
            shortfall: Some(shortfall),
        };
        let text = render(&status);
        assert!(!text.contains("--enabled on"), "{text}");
        let expected = "after the failure of a and b, 4.0 GiB of memory is missing for db";
        assert!(text.contains(expected), "{text}");
        assert!(!text.contains("HOST"), "{text}");
    }

    #[test]
    fn that_it_is_off_comes_with_the_command_that_turns_it_on() {
        let text = render(&off_with(Vec::new()));
        assert!(text.contains("off") && text.contains("ha set --enabled on"), "{text}");
        assert!(!text.contains("VM OF AGENTS"), "{text}");
    }

    fn off_with(own: Vec<HaOwnVmStatus>) -> HaStatus {
        HaStatus {
            settings: HaSettings::default(),
            hosts: Vec::new(),
            vms: Vec::new(),
            own,
            own_problems: vec!["host c: it is\u{1b} slow".to_owned()],
            shortfall: None,
        }
    }

    #[test]
    fn vms_of_agents_are_shown_while_ha_is_off() {
        let own = HaOwnVmStatus {
            vm: "manager".to_owned(),
            uuid: Uuid::nil(),
            datastore: "fast".to_owned(),
            term: 7,
            standing: OwnStanding::Doubtful,
            host: Some("a".to_owned()),
            watched_by: vec!["b".to_owned(), "c".to_owned()],
            confirm_at: Some("b".to_owned()),
            problem: Some("no kernel watchdog".to_owned()),
        };
        let text = render(&off_with(vec![own]));
        for part in [
            "the host a of VM manager does not respond",
            "godwit host ha confirm-off b manager --term 7",
            "VM OF AGENTS",
            "doubtful",
            "b c",
            "no kernel watchdog",
            "host c: it is  slow",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
    }

    #[test]
    fn a_test_of_devices_shows_each_host() {
        assert!(power(&FencingTest { hosts: BTreeMap::new() }).contains("no fencing device"));
        let state = |host: &str, state: &str| (host.to_owned(), state.to_owned());
        let hosts = BTreeMap::from([state("a", "on"), state("b", "it does not answer")]);
        let text = power(&FencingTest { hosts });
        assert!(text.contains("it does not answer") && text.contains("HOST"), "{text}");
    }
}
