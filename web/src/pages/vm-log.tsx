/** The end of a VM's log, from one of its serial ports or from QEMU. */
import { useState } from 'preact/hooks';
import { API, authorization, part, Refusal, refusal } from '../api/http';
import { Act, Empty, ProblemBox, Waiting } from '../parts/basics';
import { Choice } from '../parts/filter';
import { useLoaded } from '../parts/loaded';
import { whyNot } from '../state/session';

const TAILS = [
  ['65536', '64 KiB'],
  ['262144', '256 KiB'],
  ['1048576', '1 MiB'],
] as const;

/** The logs of a VM with this many serial ports: the query of each, and its name. */
function sourcesOf(ports: number): [string, string][] {
  const further = Array.from({ length: ports - 1 }, (_, at): [string, string] => [
    `source=console&port=${at + 2}`,
    `serial port ${at + 2}`,
  ]);
  return [['source=console', 'serial console'], ...further, ['source=qemu', 'QEMU']];
}

export function VmLog({ vm, ports }: { vm: string; ports: number }) {
  const [source, setSource] = useState('source=console');
  const [tail, setTail] = useState<string>('65536');
  const refused = whyNot('operator');
  const loaded = useLoaded(refused ? null : `${vm} ${source} ${tail}`, (signal) =>
    readLog(vm, source, tail, signal),
  );
  if (refused) return <p class="notice">{refused}</p>;
  return (
    <div class="log-frame">
      <div class="term-bar">
        <Choice label="Log" value={source} values={sourcesOf(ports)} onChange={setSource} />
        <Choice label="Last" value={tail} values={TAILS} onChange={setTail} />
        <Act onClick={loaded.reload} busy={loaded.isLoading}>
          Refresh
        </Act>
      </div>
      {loaded.problem && <ProblemBox problem={loaded.problem} />}
      {loaded.value === null && (
        <Empty>This manager does not serve logs. Run `godwit vm logs` on the host.</Empty>
      )}
      {loaded.value === '' && <Empty>The log is empty.</Empty>}
      {loaded.value && (
        // biome-ignore lint/a11y/noNoninteractiveTabindex: keys scroll it
        <pre class="log" tabIndex={0} aria-label={`Log of ${vm}`}>
          {loaded.value}
        </pre>
      )}
      {loaded.value === undefined && !loaded.problem && <Waiting lines={10} />}
    </div>
  );
}

/** Reads a log without its terminal control codes; null where the manager has no such request. */
async function readLog(
  vm: string,
  source: string,
  tail: string,
  signal: AbortSignal,
): Promise<string | null> {
  const response = await fetch(`${API}/vms/${part(vm)}/log?${source}&tail=${tail}`, {
    headers: authorization(),
    signal,
    cache: 'no-store',
  });
  if (!response.ok) {
    const failed = await refusal(response);
    if (failed instanceof Refusal && failed.problem.detail.includes('no such request')) return null;
    throw failed;
  }
  const text = await response.text();
  // biome-ignore lint/suspicious/noControlCharactersInRegex: it removes control codes
  return text.replace(/\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\r/g, '');
}
