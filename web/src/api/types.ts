/** The types of the API by their short names. They come from the manager's own document; see `npm run types`. */
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
export type AuditEntry = Schemas['AuditEntry'];
export type TokenInfo = Schemas['TokenInfo'];
export type CreatedToken = Schemas['CreatedToken'];
export type ManagedNetwork = Schemas['ManagedNetwork'];
export type ManagedDatastore = Schemas['ManagedDatastore'];
export type CreateMove = Schemas['CreateMove'];
export type CreateManagedVm = Schemas['CreateManagedVm'];
export type Problem = Schemas['Problem'];
export type PreflightRanking = Schemas['PreflightRanking'];
export type HostSummary = Schemas['HostSummary'] & {
  memory_total_bytes?: number;
  logical_cores?: number;
  load_average_1min?: number;
};

/** What this console knows of itself: `GET /api/v1/me`. */
export interface Me {
  name: string;
  role: Role;
}

export interface Page<T> {
  items: T[];
  total: number;
  next?: string | null;
}

export type Phase =
  | 'preflight'
  | 'prepare'
  | 'pre-copy'
  | 'reconnect'
  | 'convergence'
  | 'switchover'
  | 'page-in'
  | 'announce'
  | 'report';

/** A lane while a migration runs, as far as the manager tells it. */
export interface LaneProgress {
  from?: string | null;
  to: string;
  bytes?: number;
  sent_bytes?: number;
  bytes_per_s?: number;
  bandwidth_bytes_per_s?: number;
  streams?: number;
}

/** Where a running migration is. */
export interface Progress {
  phase: Phase;
  round: number;
  remaining_bytes: number;
  total_bytes: number;
  sent_bytes: number;
  dirty_bytes_per_s: number;
  bandwidth_bytes_per_s: number;
  bandwidth_limit?: number | string | null;
  eta_ms?: number | null;
  elapsed_ms: number;
  lanes?: LaneProgress[];
  guest_round_trip_ms?: number | null;
  throttled_to_pages_per_s?: number | null;
}

export interface Predicted {
  migration_time_ms: number;
  wire_bytes: number;
  rounds: number;
  switchover_ms: number;
  means: 'plain' | 'throttle' | 'page-in' | 'none';
  throttled_to_pages_per_s?: number | null;
}

export interface Prediction {
  policy?: string;
  switchover_budget_ms?: number;
  guest_bytes?: number;
  predicted?: Predicted | null;
  blackout_ms?: number | null;
  why?: string | null;
  error?: { code: string; message: string; mend: string } | null;
  dry_run_time_ms?: number;
  guest?: { dirty_pages_per_s: number; working_set_pages: number } | null;
  lanes?: { bytes_per_s: number; round_trip_ms: number } | null;
}

export interface RoundReport {
  round: number;
  pages: number;
  zero_pages: number;
  bytes: number;
  duration_ms: number;
  dirty_pages_per_s: number;
  throttled_to_pages_per_s?: number | null;
}

export interface SwitchoverReport {
  last_pages_ms: number;
  device_state_ms: number;
  flight_ms: number;
  load_ms: number;
  resume_ms: number;
}

/** How a migration went. Times in milliseconds, sizes in bytes. */
export interface Report {
  outcome: 'completed' | 'failed' | 'cancelled' | 'in-doubt';
  engine: string;
  vm: string;
  from: string;
  to: string;
  migration_time_ms: number;
  switchover_ms?: number | null;
  switchover_budget_ms?: number | null;
  blackout_ms?: number | null;
  wire_bytes: number;
  guest_bytes: number;
  round_trip_ms?: number | null;
  lanes?: { from?: string | null; to: string; streams: number; bytes: number; broken: string[] }[];
  encodings?: { name: string; pages: number; raw_bytes: number; wire_bytes: number }[];
  bandwidth?: { ms: number; bytes: number }[];
  rounds?: RoundReport[];
  throttle?: {
    means: string;
    faults: number;
    pages: number;
    held_ms: number;
    least_cpu_percent?: number | null;
  } | null;
  page_in?: {
    pages: number;
    demanded_pages: number;
    cuts: number;
    duration_ms: number;
    fetch_ms: { median: number; p90: number; p99: number; max: number };
  } | null;
  policy?: string | null;
  means?: Predicted['means'] | null;
  predicted?: Predicted | null;
  cuts?: { at_ms: number; lasted_ms: number; unsent_pages: number; why: string }[];
  phases: { phase: Phase; duration_ms: number }[];
  switchover?: SwitchoverReport | null;
  error?: { code: string; message: string; mend: string } | null;
}

export type Move = Omit<Schemas['Move'], 'progress' | 'report'> & {
  progress?: Progress | null;
  report?: Report | null;
};

export type PreflightReport = Omit<Schemas['PreflightReport'], 'prediction'> & { prediction?: Prediction | null };

export type Preflight =
  | (PreflightReport & { kind: 'report' })
  | (Omit<PreflightRanking, 'best'> & { kind: 'ranking'; best?: PreflightReport | null });

/** What a host's agent told last; what an older agent does not tell is absent. */
export interface HostInfo {
  version?: string;
  kernel?: string;
  qemu?: string;
  qemu_version?: string;
  qemu_problem?: string | null;
  kvm?: boolean;
  kvm_reason?: string | null;
  tracking_problem?: string | null;
  cpu?: { vendor?: string; name?: string; level?: string; accel?: string; features?: string[] } | null;
  logical_cores?: number;
  load_average_1min?: number;
  memory_total_bytes?: number;
  memory_available_bytes?: number;
  memory_committed_bytes?: number;
  huge_pages?: boolean;
  migration_addresses?: string[];
  networks?: Record<string, { bridge: string }>;
  vm_dirs?: string[];
  datastores?: Record<string, { free_bytes?: number; total_bytes?: number }>;
}

export type ManagedHost = Omit<Schemas['ManagedHost'], 'info'> & HostSummary & { info?: HostInfo | null };

export interface VmSpec {
  name: string;
  memory?: { size: string; backing?: string }[];
  vcpus?: number;
  cpu_model?: string;
  machine?: string;
  accel?: string;
  qemu?: string;
  kernel?: string;
  initrd?: string;
  cmdline?: string;
  disks?: { path: string; format: string; readonly?: boolean }[];
  nics?: { network: string; mac?: string; address?: string }[];
  extra_devices?: string[];
  refuses_page_in?: boolean;
  uuid?: string;
}

export interface VmInfo {
  state?: VmState;
  reason?: string | null;
  epoch?: number;
  pid?: number | null;
  accel?: string;
  machine?: string;
  migration?: string | null;
  addresses?: string[];
  in_doubt?: boolean;
  spec?: VmSpec;
}

export type ManagedVm = VmSummary & { also_at?: string[]; info: VmInfo; planned?: 'on' | 'off' | null };

/** One change of the cluster, as `GET /api/v1/events` tells it. */
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
  | { kind: 'limits'; data: MoveLimits };

export type ClusterEvent = Change & { number: number; unix_ms: number };
