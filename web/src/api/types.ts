/**
 * Short names for the types of the API. They are generated from the OpenAPI document (`npm run
 * types`).
 */
import type { components } from './schema';

type Schemas = components['schemas'];

export type Role = Schemas['Role'];
export type Cluster = Schemas['Cluster'];
export type VmState = Schemas['VmState'];
export type HostState = Schemas['HostState'];
export type MoveState = Schemas['MoveState'];
export type MovePriority = Schemas['MovePriority'];
export type Verdict = Schemas['Verdict'];
export type Check = Schemas['Check'];
export type VmSummary = Schemas['VmSummary'];
export type Drain = Schemas['Drain'];
export type DrainVm = Schemas['DrainVm'];
export type RuleInfo = Schemas['RuleInfo'];
export type MoveLimits = Schemas['MoveLimits'];
export type CpuBaseline = Schemas['CpuBaseline'];
export type CpuBaselineInfo = Schemas['CpuBaselineInfo'];
export type Alarm = Schemas['Alarm'];
export type AcknowledgeAlarm = Schemas['AcknowledgeAlarm'];
export type AlarmTest = Schemas['AlarmTest'];
export type HaStatus = Schemas['HaStatus'];
export type HaSettings = Schemas['HaSettings'];
export type HaHostStatus = Schemas['HaHostStatus'];
export type HaVmStatus = Schemas['HaVmStatus'];
export type HaOwnVmStatus = Schemas['HaOwnVmStatus'];
export type HaShortfall = Schemas['HaShortfall'];
export type ConfirmOff = Schemas['ConfirmOff'];
export type FencingTest = Schemas['FencingTest'];
export type JournalEntry = Schemas['JournalEntry'];
export type LoadHistory = Schemas['LoadHistory'];
export type AuditEntry = Schemas['AuditEntry'];
export type TokenInfo = Schemas['TokenInfo'];
export type CreatedToken = Schemas['CreatedToken'];
export type ManagedNetwork = Schemas['ManagedNetwork'];
export type ManagedDatastore = Schemas['ManagedDatastore'];
export type DatastoreAtHost = Schemas['DatastoreAtHost'];
export type DatastoreDetails = Schemas['DatastoreDetails'];
export type DatastoreDrain = Schemas['DatastoreDrain'];
export type UpdateDatastore = Schemas['UpdateDatastore'];
export type CreateMove = Schemas['CreateMove'];
export type TravellingDisks = Schemas['TravellingDisks'];
export type DisksProgress = Schemas['DisksProgress'];
export type DisksReport = Schemas['DisksReport'];
export type ChangeManagedVm = Schemas['ChangeManagedVm'];
export type CreateManagedVm = Schemas['CreateManagedVm'];
export type CloneManagedVm = Schemas['CloneManagedVm'];
export type SnapshotInfo = Schemas['SnapshotInfo'];
export type VmImages = Schemas['VmImages'];
export type Problem = Schemas['Problem'];
export type PreflightRanking = Schemas['PreflightRanking'];
export type HostSummary = Schemas['HostSummary'];
export type DiskInfo = Schemas['DiskInfo'];
export type DiskList = Schemas['DiskList'];
export type CreateRule = Schemas['CreateRule'];
export type UpdateLimits = Schemas['UpdateLimits'];
export type SetCpuBaseline = Schemas['SetCpuBaseline'];
export type CpuBaselineChange = Schemas['CpuBaselineChange'];
export type AdoptGuest = Schemas['AdoptGuest'];
export type Adoption = Schemas['Adoption'];
export type ForeignGuest = Schemas['ForeignGuest'];
export type ForeignPlace = Schemas['ForeignPlace'];
export type Fault = Schemas['Fault'];
export type ImportVm = Schemas['ImportVm'];
export type ImportPlan = Schemas['ImportPlan'];
export type ImportFinding = Schemas['ImportFinding'];
export type JobStatus = Schemas['JobStatus'];
export type WarmStep = Schemas['WarmStep'];
export type ExportVm = Schemas['ExportVm'];
export type JobKind = Schemas['JobKind'];

/** Long work in the list of a host. */
export type JobSummary = Schemas['JobSummary'];

/** The caller, from `GET /api/v1/me`. */
export type Me = Schemas['Me'];

export interface Page<T> {
  items: T[];
  total: number;
  next?: string | null;
}

export type LastCrash = Schemas['LastCrash'];
export type Firmware = Schemas['Firmware'];
export type Watchdog = Schemas['Watchdog'];
export type GuestInfo = Schemas['GuestInfo'];
export type Video = Schemas['Video'];
export type VmSpec = Schemas['VmSpec'];
export type Phase = Schemas['Phase'];
export type Predicted = Schemas['Predicted'];
export type Prediction = Schemas['DryRun'];
export type SwitchoverReport = Schemas['SwitchoverReport'];
export type Report = Schemas['Report'];
export type HostInfo = Partial<Schemas['HostInfo']>;
export type Move = Schemas['Move'];
export type PreflightReport = Schemas['PreflightReport'];
export type Preflight = Schemas['Preflight'];
export type ManagedHost = Schemas['ManagedHost'];
export type ManagedVm = Schemas['ManagedVm'];
export type HostedVm = Schemas['HostedVm'];
export type ChangedVm = Schemas['ChangedVm'];

/**
 * Progress of a running migration. Older managers report no lanes, throttle or guest round trip.
 */
export type Progress = Schemas['Progress'];
export type MoveSamples = Schemas['MoveSamples'];

/** One change of the cluster, from `GET /api/v1/events`. */
export type Change =
  | { kind: 'host'; data: HostSummary }
  | { kind: 'host-gone'; data: string }
  | { kind: 'vm'; data: VmSummary }
  | { kind: 'vm-gone'; data: string }
  | { kind: 'move'; data: Move }
  | { kind: 'drain'; data: Drain }
  | { kind: 'rule'; data: RuleInfo }
  | { kind: 'rule-gone'; data: string }
  | { kind: 'cpu-baseline'; data: CpuBaseline }
  | { kind: 'cpu-baseline-gone' }
  | { kind: 'limits'; data: MoveLimits }
  | { kind: 'alarm'; data: Alarm }
  | { kind: 'journal'; data: JournalEntry };

export type ClusterEvent = Change & { number: number; unix_ms: number };
