/** Adopts a guest: shows first what its QEMU and the host say about it. */
import { useState } from 'preact/hooks';
import { part, post } from '../api/http';
import type { AdoptGuest, Adoption, Fault, ForeignGuest, ForeignPlace } from '../api/types';
import { openImport } from '../jobs/open';
import { Act, Facts, ProblemBox, sentence, useTask, Waiting } from '../parts/basics';
import { open } from '../parts/dialog';
import { Field, Tick } from '../parts/fields';
import { FormDialog } from '../parts/form-dialog';
import { useLoaded } from '../parts/loaded';
import { Mark } from '../parts/status';
import { adoptionPath, takeAdoption } from '../state/adoptions';
import { go } from '../state/route';
import { whyNot } from '../state/session';
import { programOf, wrongSocket } from '../text/adoption';
import { bytes } from '../text/units';

/** `guest`: one of the list; null for one that the user names by its QMP socket. */
export const openAdopt = (host: string, guest: ForeignGuest | null) =>
  open((close) => <AdoptDialog host={host} guest={guest} close={close} />);

/** The request of the form. The guest's own name is the default and is not sent. */
export function adoptRequest(from: ForeignPlace, name: string, own: string | null): AdoptGuest {
  return name === '' || name === own ? { from } : { from, name };
}

function AdoptDialog(props: { host: string; guest: ForeignGuest | null; close: () => void }) {
  const { host, guest, close } = props;
  const [socket, setSocket] = useState('');
  const [name, setName] = useState(guest?.name ?? '');
  const [undefine, setUndefine] = useState(false);
  const from = guest?.from ?? { qmp: socket };
  const wanted = adoptRequest(from, name, guest?.name ?? null);
  // A check is a request of its own in the audit log: not one for each key.
  const [asked, setAsked] = useState<AdoptGuest | null>(guest ? wanted : null);
  const path = `/hosts/${part(host)}/adoptions`;
  const isAllowed = !whyNot('admin');
  const checked = useLoaded(
    asked && isAllowed ? `adoption at ${host} ${JSON.stringify(asked)}` : null,
    () => post<ForeignGuest>(`${path}/checks`, asked),
  );
  const isAsked = JSON.stringify(asked) === JSON.stringify(wanted);
  const answer = isAsked && !checked.isLoading ? checked.value : undefined;
  const task = useTask();
  const check = () => {
    task.clear();
    if (isAsked) checked.reload();
    else setAsked(wanted);
  };
  const adopt = () =>
    task.run(async () => {
      const adoption = await post<Adoption>(path, { ...wanted, undefine });
      takeAdoption(host, adoption);
      close();
      go(adoptionPath(host, adoption.id));
    });
  const isReady = answer !== undefined && answer.findings.length === 0;
  const wrong = guest ? null : wrongSocket(socket);
  const isChecking = isAsked && checked.isLoading && isAllowed;
  return (
    <FormDialog
      title={guest ? `Adopt ${guest.name}` : `Adopt a guest of ${host}`}
      verb={isReady ? 'Adopt' : isAsked && answer ? 'Check again' : 'Check'}
      task={task}
      needs="admin"
      blocked={
        isChecking ? 'The check is running.' : wrong ? 'Name the QMP socket of the guest.' : null
      }
      send={isReady ? adopt : check}
      close={close}
      others={
        'libvirt' in from &&
        answer &&
        !isReady && (
          <Act
            needs="admin"
            onClick={() => {
              close();
              openImport({ host, source: 'libvirt', from: from.libvirt });
            }}
          >
            Import instead
          </Act>
        )
      }
    >
      {guest && <About host={host} guest={answer ?? guest} />}
      {!guest && (
        <Field
          label="QMP socket"
          value={socket}
          onInput={setSocket}
          wrong={socket === '' ? null : wrong}
          hint={`A path on ${host}, for example /var/run/qemu-server/100.qmp`}
        />
      )}
      <Field
        label="Name at Godwit"
        value={name}
        onInput={setName}
        {...(guest ? {} : { hint: "Default: the guest's name" })}
      />
      {'libvirt' in from && (
        <Tick
          text="Remove libvirt's definition of it afterwards (images stay)"
          checked={undefine}
          onChange={setUndefine}
        />
      )}
      <div aria-live="polite" aria-busy={isChecking}>
        <h3>Preflight</h3>
        {isAsked && checked.problem && <ProblemBox problem={checked.problem} />}
        {isChecking && <Waiting lines={3} />}
        {answer && !guest && <About host={host} guest={answer} />}
        {answer && <Findings findings={answer.findings} />}
        {!isAsked && <p class="muted">Not checked with these settings.</p>}
        {!isAllowed && guest && <Unchecked findings={guest.findings} />}
      </div>
      <p class="muted">
        The guest runs on, with its memory and its connections. Until the hand-over, one click
        brings it back.
        {'libvirt' in from &&
          !undefine &&
          " libvirt's domain is off afterwards, and stays defined."}
      </p>
    </FormDialog>
  );
}

function About({ host, guest }: { host: string; guest: ForeignGuest }) {
  return (
    <Facts
      rows={[
        ['Host', host],
        ['Run by', programOf(guest.from)],
        ['State there', guest.state],
        ['vCPUs, memory', `${guest.vcpus ?? '–'}, ${bytes(guest.memory_bytes)}`],
      ]}
    />
  );
}

function Findings({ findings }: { findings: Fault[] }) {
  if (findings.length === 0)
    return (
      <p class="calm">
        <Mark tone="ok" shape="check" /> Nothing prevents the adoption.
      </p>
    );
  return (
    <table class="plain checks">
      <caption class="unseen">What prevents the adoption</caption>
      <thead>
        <tr>
          <th scope="col">Finding</th>
          <th scope="col">Remedy</th>
        </tr>
      </thead>
      <tbody>
        {findings.map((finding, at) => (
          <tr key={`${finding.code} ${at}`}>
            <td>
              <Mark tone="bad" shape="cross" /> {sentence(finding.message)}
            </td>
            <td>{finding.remedy ? sentence(finding.remedy) : '–'}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

/** What the list says, for a role that may not ask the guest's QEMU. */
function Unchecked({ findings }: { findings: Fault[] }) {
  return (
    <>
      {findings.length > 0 && <Findings findings={findings} />}
      <p class="muted">The guest's QEMU was not queried: this requires the role admin.</p>
    </>
  );
}
