//! Receivers of notices: webhooks and mail. Each has a bounded queue and a task, so that one that
//! does not answer delays no other. A notice is repeated with growing pauses until the receiver
//! accepts it, refuses it for good, or the attempts are used up.

mod bounded;
mod mail;
mod message;
#[cfg(test)]
pub(super) mod tests;
mod webhook;

pub(crate) use mail::Mail;
pub(crate) use webhook::Webhook;

use std::sync::Arc;
use std::time::Duration;

use godwit_api::control::{AlarmChange, AlarmNotice, AlarmSeverity, ReceiverKind, ReceiverTest};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::cluster::text::beginning;
use crate::metrics::METRICS;

/// Notices that wait for one receiver. Beyond that, notices are dropped and counted.
const WAITING_NOTICES: usize = 2_000;
/// Longest time for one delivery.
const DELIVERY_LIMIT: Duration = Duration::from_secs(15);
/// Attempts to deliver a notice: over about ten minutes.
const MOST_ATTEMPTS: u32 = 15;
/// First pause between two attempts, and the longest; each is twice the one before.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Longest reason of a failure that answers and the log show, bytes.
const MOST_REASON_BYTES: usize = 300;

/// Why a notice was not delivered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Undelivered {
    why: String,
    /// Whether another attempt is useless.
    is_final: bool,
}

impl Undelivered {
    fn now(why: &impl ToString) -> Undelivered {
        Undelivered { why: shown(&why.to_string()), is_final: false }
    }

    fn for_good(why: &impl ToString) -> Undelivered {
        Undelivered { why: shown(&why.to_string()), is_final: true }
    }
}

fn shown(why: &str) -> String {
    beginning(&super::one_line(why), MOST_REASON_BYTES)
}

/// A configured receiver.
#[derive(Debug)]
pub(crate) struct Receiver {
    name: String,
    least: AlarmSeverity,
    way: Way,
}

#[derive(Debug)]
enum Way {
    Webhook(Webhook),
    Mail(Mail),
}

impl Receiver {
    pub(super) fn webhook(name: &str, least: AlarmSeverity, webhook: Webhook) -> Receiver {
        Receiver { name: name.to_owned(), least, way: Way::Webhook(webhook) }
    }

    pub(super) fn mail(name: &str, least: AlarmSeverity, mail: Mail) -> Receiver {
        Receiver { name: name.to_owned(), least, way: Way::Mail(mail) }
    }

    fn kind(&self) -> ReceiverKind {
        match self.way {
            Way::Webhook(_) => ReceiverKind::Webhook,
            Way::Mail(_) => ReceiverKind::Mail,
        }
    }

    /// Returns whether it gets this notice. A change of the severity concerns everyone: who got a
    /// critical alarm learns that it is no longer so.
    fn wants(&self, notice: &AlarmNotice) -> bool {
        notice.alarm.severity >= self.least
            || matches!(notice.change, AlarmChange::Changed | AlarmChange::Test)
    }

    /// Returns the most notices of one delivery.
    fn most_at_once(&self) -> usize {
        match self.way {
            Way::Webhook(_) => 1,
            Way::Mail(_) => message::MOST_NOTICES,
        }
    }

    async fn deliver_once(&self, notices: &[AlarmNotice]) -> Result<(), Undelivered> {
        let delivery = async {
            match &self.way {
                Way::Webhook(webhook) => webhook.post(notices).await,
                Way::Mail(mail) => mail.send(notices).await,
            }
        };
        let late = || Undelivered::now(&format!("no answer in {} s", DELIVERY_LIMIT.as_secs()));
        timeout(DELIVERY_LIMIT, delivery).await.unwrap_or_else(|_| Err(late()))
    }

    /// Sends one notice once.
    pub(super) async fn test(&self, notice: &AlarmNotice) -> ReceiverTest {
        let sent = self.deliver_once(std::slice::from_ref(notice)).await;
        ReceiverTest {
            name: self.name.clone(),
            kind: self.kind(),
            delivered: sent.is_ok(),
            error: sent.err().map(|undelivered| undelivered.why),
        }
    }

    /// Sends notices until they are accepted, or further attempts are useless.
    async fn deliver(&self, notices: &[AlarmNotice], first_pause: Duration) {
        let mut pause = first_pause;
        for attempt in 1..=MOST_ATTEMPTS {
            let Undelivered { why, is_final } = match self.deliver_once(notices).await {
                Ok(()) => {
                    METRICS.notices(self.kind(), "delivered", notices.len());
                    return;
                }
                Err(undelivered) => undelivered,
            };
            let receiver = &self.name;
            if is_final || attempt == MOST_ATTEMPTS {
                let lost = notices.len();
                tracing::error!(receiver, why, lost, "cannot deliver a notice about an alarm");
                break;
            }
            if attempt == 1 {
                tracing::warn!(receiver, why, "cannot deliver a notice about an alarm; retrying");
            }
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        METRICS.notices(self.kind(), "failed", notices.len());
    }
}

/// Queues of all receivers. Notices that wait are lost when it is dropped.
pub(super) struct Outbox {
    receivers: Vec<Arc<Receiver>>,
    queues: Vec<mpsc::Sender<AlarmNotice>>,
    /// Tasks that end on drop.
    _tasks: JoinSet<()>,
}

impl Outbox {
    /// Starts a task for each receiver.
    pub(super) fn begin(receivers: Vec<Arc<Receiver>>) -> Outbox {
        Outbox::with_pause(receivers, FIRST_PAUSE)
    }

    fn with_pause(receivers: Vec<Arc<Receiver>>, first_pause: Duration) -> Outbox {
        let (mut queues, mut tasks) = (Vec::new(), JoinSet::new());
        for receiver in &receivers {
            let (queue, waiting) = mpsc::channel(WAITING_NOTICES);
            queues.push(queue);
            tasks.spawn(deliver_all(Arc::clone(receiver), waiting, first_pause));
        }
        Outbox { receivers, queues, _tasks: tasks }
    }

    pub(super) fn receivers(&self) -> &[Arc<Receiver>] {
        &self.receivers
    }

    /// Queues a notice for each receiver that wants it, without waiting.
    pub(super) fn push(&self, notice: &AlarmNotice) {
        for (receiver, queue) in self.receivers.iter().zip(&self.queues) {
            if receiver.wants(notice) && queue.try_send(notice.clone()).is_err() {
                let receiver_name = &receiver.name;
                tracing::error!(receiver_name, "too many notices wait for a receiver of alarms");
                METRICS.notices(receiver.kind(), "failed", 1);
            }
        }
    }
}

async fn deliver_all(
    receiver: Arc<Receiver>,
    mut waiting: mpsc::Receiver<AlarmNotice>,
    first_pause: Duration,
) {
    let mut notices = Vec::new();
    while waiting.recv_many(&mut notices, receiver.most_at_once()).await > 0 {
        receiver.deliver(&notices, first_pause).await;
        notices.clear();
    }
}
