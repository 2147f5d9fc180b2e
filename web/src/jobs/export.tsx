/** Exports a stopped VM into a directory of its host. */
import { useState } from 'preact/hooks';
import { get, part, post } from '../api/http';
import type { ExportVm, JobStatus, ManagedHost } from '../api/types';
import { useTask } from '../parts/basics';
import { Field, Select } from '../parts/fields';
import { FormDialog } from '../parts/form-dialog';
import { useLoaded } from '../parts/loaded';
import { wrongPath } from './import-request';
import type { JobKey } from './job';

type Format = ExportVm['format'];

const FORMATS = [
  ['libvirt', 'libvirt: XML and qcow2 images'],
  ['ova', 'OVA: one package with VMDK images'],
] as const;

export function ExportDialog(props: {
  vm: { name: string; host: string };
  begun: (key: JobKey) => void;
  close: () => void;
}) {
  const { name, host } = props.vm;
  const [to, setTo] = useState('');
  const [format, setFormat] = useState<Format>('libvirt');
  const loaded = useLoaded(`directories of ${host}`, (signal) =>
    get<ManagedHost>(`/hosts/${part(host)}`, signal),
  );
  const dirs = loaded.value?.info?.vm_dirs ?? [];
  const task = useTask();
  const wrong = wrongPath(to);
  const send = () =>
    task.run(async () => {
      const request: ExportVm = { to, format };
      const job = await post<JobStatus>(`/vms/${part(name)}/export`, request);
      props.begun({ host, id: job.id, kind: 'export', name });
    });
  return (
    <FormDialog
      title={`Export ${name}`}
      verb="Export"
      task={task}
      blocked={wrong ? 'Name a directory of the host.' : null}
      send={send}
      close={props.close}
    >
      <Field
        label="Directory"
        value={to}
        onInput={setTo}
        wrong={to === '' ? null : wrong}
        offers={dirs}
        hint={`On ${host}, in ${dirs.join(' or ') || 'one of its directories for VMs'}`}
      />
      <Select<Format> label="Format" value={format} values={FORMATS} onChange={setFormat} />
      <p class="muted">The VM stays as it is. Existing files are not replaced.</p>
    </FormDialog>
  );
}
