//! Migrations: they share their links and take as long as the links need for the memory.

use godwit_api::{
    ApiError, ErrorCode, HostEvent, MigrationAccepted, MigrationRequest, MigrationStatus, VmInfo,
    VmState,
};
use godwit_types::{
    DiskReport, DryRun, Fault, LaneProgress, Means, Outcome, Phase, PhaseReport, Predicted,
    Progress, Report,
};

use super::{Counts, InjectedFault, World, disks};

/// Number of migrations that a host remembers, as agents do.
const HISTORY: usize = 256;
/// Interval of progress reports in milliseconds, as long as the agents' poll interval.
const PROGRESS_INTERVAL_MS: u64 = 250;
/// Duration of checks and of making the shadow VM, in milliseconds of the fleet's time.
const PREPARE_MS: f64 = 300.0;
/// Pause of the vCPUs in reports, in milliseconds.
const SWITCHOVER_MS: f64 = 9.0;

/// Migration in progress.
#[derive(Debug)]
pub(crate) struct Running {
    id: String,
    vm: String,
    source: usize,
    target: usize,
    began_ms: u64,
    reported_ms: u64,
    /// Remaining preparation, in milliseconds of the fleet's time.
    prepare_ms: f64,
    total_bytes: u64,
    /// Disks that travel before the memory.
    disks: Vec<DiskReport>,
    /// Bytes of disks and memory that were sent.
    sent_bytes: f64,
    bytes_per_s: f64,
    was: VmState,
    cancelled: bool,
    /// Reason of a failure, and the number of sent bytes at which it occurs.
    fails: Option<(Fault, f64)>,
}

fn refuse<T>(code: ErrorCode, message: impl Into<String>, remedy: &str) -> Result<T, ApiError> {
    Err(ApiError::new(code, message, remedy))
}

fn failure(code: &str, message: String) -> Fault {
    Fault { code: code.to_owned(), message, remedy: "a fault of the simulated fleet".to_owned() }
}

impl World {
    /// Starts a migration, as an agent does: once for each ID.
    pub(crate) fn migrate(
        &mut self,
        at: usize,
        vm: &str,
        request: &MigrationRequest,
        now_ms: u64,
        unix_ms: u64,
    ) -> Result<MigrationAccepted, ApiError> {
        if let Some(id) = &request.id
            && let Some(known) = self.hosts[at].migrations.iter().find(|known| known.id == *id)
        {
            if known.vm == vm && known.to == request.to {
                self.counts.repeated += 1;
                return Ok(MigrationAccepted { id: id.clone() });
            }
            let message =
                format!("migration {id} is that of VM \"{}\" to host {}", known.vm, known.to);
            return refuse(ErrorCode::AlreadyExists, message, "take another id");
        }
        let was = self.may_leave(at, vm, request)?;
        let target = self.target(at, &request.to)?;
        if let Some(InjectedFault::Refuse(code)) =
            self.take_fault(vm, |fault| matches!(fault, InjectedFault::Refuse(_)))
        {
            return refuse(
                code,
                format!("VM \"{vm}\" is to be refused"),
                "a fault of the simulated fleet",
            );
        }
        let count: u64 = self.counts.begun.values().sum();
        let id = request.id.clone().unwrap_or_else(|| format!("m{unix_ms:x}-{count}"));
        let total_bytes = self.hosts[at].vms.get(vm).map_or(0, |vm| vm.memory_bytes);
        let disks = self.hosts[at].vms.get(vm);
        let disks = disks.map(|vm| disks::travelling(vm, request.disks.as_ref()));
        let fails = self.why_it_will_fail(vm, target, total_bytes);
        let status = MigrationStatus {
            id: id.clone(),
            vm: vm.to_owned(),
            from: self.hosts[at].info.name.clone(),
            to: request.to.clone(),
            engine: request.engine,
            started_unix_ms: unix_ms,
            bandwidth_limit: request.bandwidth_limit.unwrap_or_default(),
            progress: Progress::begin(total_bytes),
            report: None,
        };
        self.running.push(Running {
            id: id.clone(),
            vm: vm.to_owned(),
            source: at,
            target,
            began_ms: now_ms,
            reported_ms: now_ms,
            prepare_ms: PREPARE_MS,
            total_bytes,
            disks: disks.unwrap_or_default(),
            sent_bytes: 0.0,
            bytes_per_s: 0.0,
            was,
            cancelled: false,
            fails,
        });
        self.remember(at, status);
        self.leaves(at, target, vm, &id);
        self.count(at, target, vm);
        Ok(MigrationAccepted { id })
    }

    /// Checks that a VM's state allows it to leave.
    fn may_leave(
        &mut self,
        at: usize,
        vm: &str,
        request: &MigrationRequest,
    ) -> Result<VmState, ApiError> {
        let host = &self.hosts[at];
        let Some(found) = host.vms.get(vm) else {
            self.counts.not_there += 1;
            return Err(host.no_vm(vm));
        };
        match found.state {
            state @ (VmState::Running | VmState::Paused) => Ok(state),
            VmState::MigratingOut => {
                self.counts.double_begins += 1;
                let message = format!("VM \"{vm}\" is on its way to another host");
                refuse(ErrorCode::Busy, message, "wait for the end of its migration")
            }
            VmState::MigratingIn => {
                self.counts.not_there += 1;
                let message = format!("VM \"{vm}\" is on its way to host {}", host.info.name);
                refuse(ErrorCode::Busy, message, "ask the host that runs it")
            }
            state => {
                let message =
                    format!("VM \"{vm}\" is {state}: it cannot move to host {}", request.to);
                refuse(ErrorCode::WrongState, message, "start it")
            }
        }
    }

    fn target(&self, at: usize, to: &str) -> Result<usize, ApiError> {
        let source = &self.hosts[at].info;
        if source.name == to {
            return refuse(
                ErrorCode::InvalidRequest,
                format!("host {to} is the host the VM is on"),
                "name another host",
            );
        }
        match self.find(to) {
            Some(target) if source.peers.contains_key(to) => Ok(target),
            _ => {
                let message = format!("host {} knows no host \"{to}\"", source.name);
                refuse(ErrorCode::NotFound, message, "its manager names the others")
            }
        }
    }

    fn why_it_will_fail(
        &mut self,
        vm: &str,
        target: usize,
        total_bytes: u64,
    ) -> Option<(Fault, f64)> {
        let host = &self.hosts[target];
        let name = host.info.name.clone();
        if host.silent {
            return Some((
                failure("peer-unreachable", format!("host {name} does not answer")),
                0.0,
            ));
        }
        if host.info.memory_available_bytes < total_bytes {
            return Some((
                failure("insufficient-memory", format!("host {name} has too little memory")),
                0.0,
            ));
        }
        self.take_fault(vm, |fault| fault == InjectedFault::FailHalfWay)?;
        #[expect(clippy::cast_precision_loss, reason = "sizes below 2^53")]
        let half = total_bytes as f64 / 2.0;
        Some((failure("lane-lost", format!("the link to host {name} broke")), half))
    }

    fn remember(&mut self, at: usize, status: MigrationStatus) {
        let all = &mut self.hosts[at].migrations;
        while all.len() >= HISTORY {
            let Some(oldest) = all.iter().position(|one| one.report.is_some()) else { break };
            all.remove(oldest);
        }
        all.push_back(status);
    }

    fn leaves(&mut self, source: usize, target: usize, vm: &str, id: &str) {
        let from = self.hosts[source].info.name.clone();
        let host = &mut self.hosts[source];
        let Some(info) = host.vms.get_mut(vm) else { return };
        info.state = VmState::MigratingOut;
        info.migration = Some(id.to_owned());
        let shadow = info.clone();
        host.report_vm(vm);
        let host = &mut self.hosts[target];
        let shadow = VmInfo {
            host: host.info.name.clone(),
            state: VmState::MigratingIn,
            reason: Some(format!("arriving from host {from}, which runs it")),
            epoch: shadow.epoch + 1,
            migration: None,
            ..shadow
        };
        host.vms.insert(vm.to_owned(), shadow);
        host.recount();
        host.report_vm(vm);
        self.report_migration(source, id);
    }

    fn count(&mut self, source: usize, target: usize, vm: &str) {
        *self.counts.begun.entry(vm.to_owned()).or_default() += 1;
        let out = self.running.iter().filter(|one| one.source == source).count();
        let arriving = self.running.iter().filter(|one| one.target == target).count();
        let as_u32 = |count| u32::try_from(count).unwrap_or(u32::MAX);
        Counts::note(&mut self.counts.most_out, &self.hosts[source].info.name, as_u32(out));
        Counts::note(&mut self.counts.most_in, &self.hosts[target].info.name, as_u32(arriving));
        self.counts.most_at_once = self.counts.most_at_once.max(as_u32(self.running.len()));
    }

    /// Requests the rollback of a migration.
    pub(crate) fn cancel(&mut self, at: usize, id: &str) -> Result<(), ApiError> {
        let known = self.migration(at, id)?;
        if known.report.is_some() {
            let message = format!("migration {id} is over already");
            return refuse(
                ErrorCode::WrongState,
                message,
                "see its report with `godwit migration show`",
            );
        }
        if let Some(running) = self.running.iter_mut().find(|one| one.id == id && one.source == at)
        {
            running.cancelled = true;
        }
        Ok(())
    }

    pub(crate) fn migration(&self, at: usize, id: &str) -> Result<MigrationStatus, ApiError> {
        let host = &self.hosts[at];
        let missing = || {
            let message = format!("no migration {id} on this host");
            ApiError::new(ErrorCode::NotFound, message, "see `godwit migration list`")
        };
        host.migrations.iter().find(|one| one.id == id).cloned().ok_or_else(missing)
    }

    /// Predicts a migration that has the link for itself.
    pub(crate) fn dry_run(
        &self,
        at: usize,
        vm: &str,
        request: &MigrationRequest,
    ) -> Result<DryRun, ApiError> {
        let host = &self.hosts[at];
        let found = host.vms.get(vm).ok_or_else(|| host.no_vm(vm))?;
        let target = self.target(at, &request.to)?;
        let lacks = self.hosts[target].info.memory_available_bytes < found.memory_bytes;
        let disks = disks::travelling(found, request.disks.as_ref());
        let bytes = found.memory_bytes + disks::bytes(&disks);
        #[expect(clippy::cast_precision_loss, reason = "sizes below 2^53")]
        let migration_time_ms = (PREPARE_MS
            + bytes as f64 * 8_000.0 / self.plan.link_bits_per_s.max(1) as f64)
            / self.plan.speed;
        let predicted = Predicted {
            migration_time_ms,
            wire_bytes: found.memory_bytes,
            rounds: 2,
            switchover_ms: SWITCHOVER_MS,
            means: Means::Plain,
            throttled_to_pages_per_s: None,
        };
        Ok(DryRun {
            vm: vm.to_owned(),
            from: host.info.name.clone(),
            to: request.to.clone(),
            policy: request.policy,
            switchover_budget_ms: request.switchover_budget_ms,
            guest_bytes: found.memory_bytes,
            predicted: (!lacks).then_some(predicted),
            blackout_ms: Some(SWITCHOVER_MS),
            why: Some("it writes little: simulated QEMU".to_owned()),
            guest: None,
            lanes: None,
            error: lacks.then(|| {
                failure("insufficient-memory", format!("host {} has too little memory", request.to))
            }),
            dry_run_time_ms: 1.0,
        })
    }

    /// Kills and restarts a host's agent: it remembers no migration, and those from this host have
    /// ended without a report.
    pub(crate) fn restart(&mut self, at: usize) {
        let Some(host) = self.hosts.get_mut(at) else { return };
        host.watchers.clear();
        host.migrations.clear();
        let (ended, running) = self.running.drain(..).partition(|one| one.source == at);
        self.running = running;
        let ended: Vec<Running> = ended;
        for one in ended {
            self.end(&one, Outcome::Failed, None, self.stepped_ms);
        }
    }

    /// Advances to this moment.
    pub(crate) fn step(&mut self, now_ms: u64) {
        let passed_ms = now_ms.saturating_sub(self.stepped_ms);
        self.stepped_ms = now_ms;
        self.advance(passed_ms);
        let mut over = Vec::new();
        self.running.retain_mut(|one| {
            let outcome = one.outcome();
            let is_over = outcome.is_some();
            if let Some(outcome) = outcome {
                over.push((std::mem::replace(one, one.gone()), outcome));
            }
            !is_over
        });
        for (one, (outcome, error)) in over {
            self.end(&one, outcome, error.as_ref(), now_ms);
        }
        self.report_progress(now_ms);
        self.report_hosts(now_ms);
    }

    /// Advances all migrations, which share links evenly.
    fn advance(&mut self, passed_ms: u64) {
        #[expect(clippy::cast_precision_loss, reason = "milliseconds of a test")]
        let passed_ms = passed_ms as f64 * self.plan.speed;
        #[expect(clippy::cast_precision_loss, reason = "rates below 2^53")]
        let link_bytes_per_s = self.plan.link_bits_per_s as f64 / 8.0;
        let (mut out, mut arriving) =
            (vec![0.0_f64; self.hosts.len()], vec![0.0_f64; self.hosts.len()]);
        for one in &self.running {
            out[one.source] += 1.0;
            arriving[one.target] += 1.0;
        }
        for one in &mut self.running {
            let left_ms = passed_ms - one.prepare_ms.min(passed_ms);
            one.prepare_ms = (one.prepare_ms - passed_ms).max(0.0);
            one.bytes_per_s = link_bytes_per_s / out[one.source].max(arriving[one.target]);
            one.sent_bytes += one.bytes_per_s * left_ms / 1000.0;
        }
    }

    fn end(&mut self, one: &Running, outcome: Outcome, error: Option<&Fault>, now_ms: u64) {
        match outcome {
            Outcome::Completed => self.counts.completed += 1,
            Outcome::Cancelled => self.counts.cancelled += 1,
            _ => self.counts.failed += 1,
        }
        let gone_at = if outcome == Outcome::Completed { one.source } else { one.target };
        let stays_at = if outcome == Outcome::Completed { one.target } else { one.source };
        if let Some(vm) = self.hosts[stays_at].vms.get_mut(&one.vm) {
            (vm.state, vm.reason, vm.migration) = (one.was, None, None);
            if outcome == Outcome::Completed {
                disks::arrive(vm, &one.disks);
            }
        }
        let host = &mut self.hosts[stays_at];
        host.recount();
        host.report_vm(&one.vm);
        let host = &mut self.hosts[gone_at];
        host.vms.remove(&one.vm);
        host.recount();
        host.publish(&HostEvent::VmGone(one.vm.clone()));
        let from = self.hosts[one.source].info.name.clone();
        let to = self.hosts[one.target].info.name.clone();
        let report = one.report((&from, &to), outcome, error, now_ms);
        let host = &mut self.hosts[one.source];
        if let Some(status) = host.migrations.iter_mut().find(|status| status.id == one.id) {
            status.progress = one.progress(now_ms, Phase::Report);
            status.report = Some(report);
        }
        self.report_migration(one.source, &one.id);
    }

    fn report_progress(&mut self, now_ms: u64) {
        let mut reports = Vec::new();
        for one in &mut self.running {
            if now_ms.saturating_sub(one.reported_ms) >= PROGRESS_INTERVAL_MS {
                one.reported_ms = now_ms;
                let phase = match one.prepare_ms > 0.0 {
                    true => Phase::Prepare,
                    false if one.sent_of_disks() < disks::bytes(&one.disks) => Phase::Disks,
                    false => Phase::PreCopy,
                };
                reports.push((one.source, one.id.clone(), one.progress(now_ms, phase)));
            }
        }
        for (source, id, progress) in reports {
            if let Some(status) =
                self.hosts[source].migrations.iter_mut().find(|status| status.id == id)
            {
                status.progress = progress;
            }
            self.report_migration(source, &id);
        }
    }

    fn report_migration(&mut self, at: usize, id: &str) {
        let host = &mut self.hosts[at];
        if let Some(status) = host.migrations.iter().rev().find(|status| status.id == id).cloned() {
            host.publish(&HostEvent::Migration(Box::new(status)));
        }
    }
}

impl Running {
    /// Returns a placeholder while the migration is taken out.
    fn gone(&self) -> Running {
        Running { id: String::new(), vm: String::new(), disks: Vec::new(), fails: None, ..*self }
    }

    /// Returns the outcome, if it has ended.
    fn outcome(&mut self) -> Option<(Outcome, Option<Fault>)> {
        if self.cancelled {
            let error = Fault {
                code: "cancelled".to_owned(),
                message: "cancelled by an operator".to_owned(),
                remedy: String::new(),
            };
            return Some((Outcome::Cancelled, Some(error)));
        }
        if self.prepare_ms > 0.0 {
            return None;
        }
        if let Some((error, _)) = self.fails.take_if(|(_, at)| self.sent_bytes >= *at) {
            return Some((Outcome::Failed, Some(error)));
        }
        #[expect(clippy::cast_precision_loss, reason = "sizes below 2^53")]
        let is_done = self.sent_bytes >= (disks::bytes(&self.disks) + self.total_bytes) as f64;
        is_done.then_some((Outcome::Completed, None))
    }

    /// Returns the bytes of disks and memory that were sent.
    fn sent_in_all(&self) -> u64 {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "no more than the guest's memory and disks"
        )]
        let sent = self.sent_bytes as u64;
        sent.min(disks::bytes(&self.disks) + self.total_bytes)
    }

    fn sent_of_disks(&self) -> u64 {
        self.sent_in_all().min(disks::bytes(&self.disks))
    }

    /// Returns the bytes of memory that were sent.
    fn sent(&self) -> u64 {
        self.sent_in_all() - self.sent_of_disks()
    }

    fn elapsed_ms(&self, now_ms: u64) -> f64 {
        f64::from(u32::try_from(now_ms.saturating_sub(self.began_ms)).unwrap_or(u32::MAX))
    }

    fn progress(&self, now_ms: u64, phase: Phase) -> Progress {
        let remaining_bytes = self.total_bytes - self.sent();
        let disks = disks::progress(&self.disks, self.sent_of_disks(), self.bytes_per_s);
        let left_bytes = remaining_bytes + disks.map_or(0, |disks| disks.remaining_bytes);
        #[expect(clippy::cast_precision_loss, reason = "sizes below 2^53")]
        let eta_ms =
            (self.bytes_per_s > 0.0).then(|| left_bytes as f64 * 1000.0 / self.bytes_per_s);
        Progress {
            phase,
            remaining_bytes,
            sent_bytes: self.sent(),
            bandwidth_bytes_per_s: self.bytes_per_s,
            lanes: vec![LaneProgress {
                from: "10.0.0.1".parse().ok(),
                to: "10.0.0.2:7701".parse().ok(),
                streams: 2,
                bytes: self.sent_in_all(),
                bytes_per_s: self.bytes_per_s,
            }],
            guest_round_trip_ms: Some(if phase == Phase::Switchover { SWITCHOVER_MS } else { 0.4 }),
            disks,
            eta_ms,
            elapsed_ms: self.elapsed_ms(now_ms),
            ..Progress::begin(self.total_bytes)
        }
    }

    fn report(
        &self,
        (from, to): (&str, &str),
        outcome: Outcome,
        error: Option<&Fault>,
        now_ms: u64,
    ) -> Report {
        let is_completed = outcome == Outcome::Completed;
        let pre_copy = PhaseReport { phase: Phase::PreCopy, duration_ms: self.elapsed_ms(now_ms) };
        Report {
            migration_time_ms: self.elapsed_ms(now_ms),
            switchover_ms: is_completed.then_some(SWITCHOVER_MS),
            wire_bytes: self.sent(),
            guest_bytes: self.total_bytes,
            round_trip_ms: Some(0.1),
            disks: if is_completed {
                disks::report(&self.disks, self.elapsed_ms(now_ms))
            } else {
                None
            },
            phases: vec![pre_copy],
            error: error.cloned(),
            ..Report::blank(outcome, &self.vm, from, to)
        }
    }
}
