//! Implements `godwit control alarm`.

use godwit_api::control::{
    AcknowledgeAlarm, Acknowledgement, Alarm, AlarmTest, ManagerClient, ReceiverTest,
};

use crate::args::AlarmCommand;
use crate::exit::{Exit, Failure};
use crate::output::{Output, table};
use crate::units::utc;

pub(crate) async fn run(
    command: AlarmCommand,
    manager: &ManagerClient,
    output: Output,
) -> Result<Exit, Failure> {
    match command {
        AlarmCommand::List { open } => {
            let mut alarms = manager.alarms().await?;
            alarms.retain(|alarm| !open || alarm.acknowledged.is_none());
            output.result(&alarms, || list(&alarms))?;
        }
        AlarmCommand::Acknowledge { id, note } => {
            let alarm = manager.acknowledge_alarm(&id, &AcknowledgeAlarm { note }).await?;
            output.result(&alarm, || format!("alarm {id} is acknowledged: {}", alarm.text))?;
        }
        AlarmCommand::Test => {
            let test = manager.test_alarms().await?;
            output.result(&test, || outcomes(&test))?;
            if test.receivers.iter().any(|receiver| !receiver.delivered) {
                return Ok(Exit::Failure);
            }
        }
    }
    Ok(Exit::Ok)
}

fn list(alarms: &[Alarm]) -> String {
    if alarms.is_empty() {
        return "no alarm is raised".to_owned();
    }
    let row = |alarm: &Alarm| {
        let by = alarm.acknowledged.as_ref().map(|Acknowledgement { by, note, .. }| {
            if note.is_empty() { by.clone() } else { format!("{by}: {note}") }
        });
        vec![
            alarm.id.clone(),
            utc(alarm.raised_unix_ms),
            alarm.severity.name().to_owned(),
            alarm.object.clone(),
            by.unwrap_or_else(|| "-".to_owned()),
            alarm.text.clone(),
        ]
    };
    let rows: Vec<_> = alarms.iter().map(row).collect();
    table(&["alarm", "since", "severity", "object", "acknowledged", "text"], &rows)
}

fn outcomes(test: &AlarmTest) -> String {
    if test.receivers.is_empty() {
        return "no receiver is configured (docs/alarms.md)".to_owned();
    }
    let row = |receiver: &ReceiverTest| {
        let error = receiver.error.clone();
        let outcome = if receiver.delivered { "delivered" } else { "failed" };
        vec![
            receiver.name.clone(),
            receiver.kind.name().to_owned(),
            outcome.to_owned(),
            error.unwrap_or_else(|| "-".to_owned()),
        ]
    };
    let rows: Vec<_> = test.receivers.iter().map(row).collect();
    table(&["receiver", "kind", "outcome", "error"], &rows)
}

#[cfg(test)]
mod tests {
    use godwit_api::control::{AlarmKind, AlarmSeverity, ReceiverKind};

    use super::*;

    #[test]
    fn a_list_names_what_is_wrong_and_who_attends_to_it() {
        assert_eq!(list(&[]), "no alarm is raised");
        let acknowledged = Acknowledgement {
            by: "ana".to_owned(),
            at_unix_ms: 2,
            note: "disks are ordered".to_owned(),
        };
        let alarm = Alarm {
            id: "a1".to_owned(),
            kind: AlarmKind::DatastoreFilling,
            severity: AlarmSeverity::Warning,
            object: "datastore:fast".to_owned(),
            text: "datastore fast is 87 % full".to_owned(),
            remedy: "delete images".to_owned(),
            raised_unix_ms: 1,
            cleared_unix_ms: None,
            acknowledged: Some(acknowledged),
        };
        let text = list(&[alarm]);
        for part in ["a1", "warning", "datastore:fast", "ana: disks are ordered", "87 % full"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn a_test_shows_each_receiver() {
        let receiver = ReceiverTest {
            name: "pager".to_owned(),
            kind: ReceiverKind::Webhook,
            delivered: false,
            error: Some("it answers 500".to_owned()),
        };
        let text = outcomes(&AlarmTest { receivers: vec![receiver] });
        assert!(text.contains("pager") && text.contains("failed"), "{text}");
        assert!(outcomes(&AlarmTest { receivers: vec![] }).contains("no receiver"));
    }
}
