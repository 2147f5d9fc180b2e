//! Implements `godwit control rule`.

use std::collections::BTreeSet;

use godwit_api::control::{
    CreateRule, ManagerClient, RuleBreaker, RuleHosts, RuleInfo, RuleStrength,
};

use crate::args::{CreateRuleArgs, RuleCommand};
use crate::exit::Failure;
use crate::output::{Output, fields, table};

pub(crate) async fn run(
    command: RuleCommand,
    manager: &ManagerClient,
    output: Output,
) -> Result<(), Failure> {
    match command {
        RuleCommand::Create(options) => {
            let made = manager.create_rule(&request(options)?).await?;
            output.result(&made, || rule_fields(&made))
        }
        RuleCommand::List => {
            let rules = manager.rules().await?;
            let rows: Vec<_> = rules.iter().map(row).collect();
            output.result(&rules, || {
                table(&["rule", "kind", "strength", "vms", "state", "broken by"], &rows)
            })
        }
        RuleCommand::Show { name } => {
            let found = manager.rule(&name).await?;
            output.result(&found, || rule_fields(&found))
        }
        RuleCommand::Delete { name } => {
            manager.delete_rule(&name).await?;
            output.result(&serde_json::json!({ "deleted": name }), || {
                format!("rule {name} is deleted")
            })
        }
    }
}

fn request(options: CreateRuleArgs) -> Result<CreateRule, Failure> {
    let CreateRuleArgs { name, kind, vms, at, at_labels, should } = options;
    let keys: BTreeSet<&str> = at_labels.iter().map(|(key, _)| key.as_str()).collect();
    if keys.len() < at_labels.len() {
        let message = "cannot use a label twice: no host has two values of one label";
        return Err(Failure::usage(
            message.to_owned(),
            "create a rule for each value, or change the labels of the hosts",
        ));
    }
    let names_hosts = !at.is_empty() || !at_labels.is_empty();
    Ok(CreateRule {
        name,
        kind,
        strength: if should { RuleStrength::Should } else { RuleStrength::Must },
        vms,
        hosts: names_hosts
            .then(|| RuleHosts { names: at, labels: at_labels.into_iter().collect() }),
    })
}

fn row(rule: &RuleInfo) -> Vec<String> {
    let named: Vec<&str> = rule.broken_by.iter().map(|breaker| breaker.vm.as_str()).collect();
    let named = match rule.broken_by_count - named.len() as u64 {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    };
    vec![
        rule.name.clone(),
        rule.kind.name().to_owned(),
        rule.strength.name().to_owned(),
        rule.vms.len().to_string(),
        rule.state.name().to_owned(),
        named,
    ]
}

fn rule_fields(rule: &RuleInfo) -> String {
    let mut rows = vec![
        ("rule", rule.name.clone()),
        ("kind", rule.kind.name().to_owned()),
        ("strength", rule.strength.name().to_owned()),
        ("vms", rule.vms.join(", ")),
    ];
    if let Some(RuleHosts { names, labels }) = &rule.hosts {
        let labels = labels.iter().map(|(key, value)| format!("{key}={value}"));
        let labels: Vec<String> = labels.collect();
        rows.extend((!names.is_empty()).then(|| ("hosts", names.join(", "))));
        rows.extend((!labels.is_empty()).then(|| ("hosts with", labels.join(", "))));
    }
    rows.push(("state", rule.state.name().to_owned()));
    rows.extend(
        rule.broken_by
            .iter()
            .map(|RuleBreaker { vm, why, .. }| ("broken by", format!("{vm}: {why}"))),
    );
    rows.extend((!rule.absent.is_empty()).then(|| ("unknown", rule.absent.join(", "))));
    fields(&rows)
}
