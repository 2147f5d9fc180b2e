/** Tokens and the audit log, for admins. */
import { useState } from 'preact/hooks';
import { managerNow } from '../api/clock';
import { get, part, post, remove } from '../api/http';
import type { AuditEntry, CreatedToken, Page, Role, TokenInfo } from '../api/types';
import { confirm } from '../dialogs/confirm';
import { Act, Empty, PageHead, ProblemBox, useTask, Waiting } from '../parts/basics';
import { Dialog, open } from '../parts/dialog';
import { Field } from '../parts/fields';
import { Choice } from '../parts/filter';
import { useLoaded } from '../parts/loaded';
import { Status } from '../parts/status';
import { whyNot } from '../state/session';
import { actionText } from '../text/audit';
import { dateTime } from '../text/units';

const ROLES = [
  ['viewer', 'viewer: read only'],
  ['operator', 'operator: manages VMs, moves and drains'],
  ['admin', 'admin: full access'],
] as const;

export function TokensPage() {
  const refused = whyNot('admin');
  const loaded = useLoaded(refused ? null : 'tokens', (signal) =>
    get<TokenInfo[]>('/tokens', signal),
  );
  const now = managerNow();
  return (
    <>
      <PageHead
        title="Tokens"
        side={
          <Act
            kind="primary"
            needs="admin"
            onClick={() => open((close) => <CreateToken close={close} made={loaded.reload} />)}
          >
            Create token
          </Act>
        }
      >
        <span class="muted">
          Tokens give access to the API. The secret is shown once, when the token is created.
        </span>
      </PageHead>
      {refused && <p class="notice">{refused}</p>}
      {loaded.problem && <ProblemBox problem={loaded.problem} />}
      {!loaded.value && !loaded.problem && !refused && <Waiting lines={5} />}
      {loaded.value && (
        <div class="scroll-x panel">
          <table class="plain">
            <thead>
              <tr>
                <th scope="col">Name</th>
                <th scope="col">Role</th>
                <th scope="col">Created</th>
                <th scope="col">Expires</th>
                <th scope="col">Created by</th>
                <th scope="col">
                  <span class="unseen">Revoke</span>
                </th>
              </tr>
            </thead>
            <tbody>
              {loaded.value.map((token) => (
                <tr key={token.id}>
                  <th scope="row">{token.name}</th>
                  <td>{token.role}</td>
                  <td class="digits">{dateTime(token.made_unix_ms)}</td>
                  <td class="digits">
                    {token.expires_unix_ms < now ? (
                      <span class="tone-bad">expired</span>
                    ) : (
                      dateTime(token.expires_unix_ms)
                    )}
                  </td>
                  <td>{token.made_by}</td>
                  <td>
                    <Act
                      kind="quiet"
                      needs="admin"
                      name={`Revoke token ${token.name}`}
                      onClick={() => askRevoke(token, loaded.reload)}
                    >
                      Revoke
                    </Act>
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
          {loaded.value.length === 0 && <Empty>No tokens.</Empty>}
        </div>
      )}
    </>
  );
}

function askRevoke(token: TokenInfo, reload: () => void): void {
  confirm({
    title: `Revoke token ${token.name}`,
    text: 'The token stops working at once. Sessions that use it are logged out.',
    verb: 'Revoke',
    run: async () => {
      await remove(`/tokens/${part(token.id)}`);
      reload();
    },
  });
}

function CreateToken({ close, made }: { close: () => void; made: () => void }) {
  const [name, setName] = useState('');
  const [role, setRole] = useState<Role>('viewer');
  const [days, setDays] = useState('90');
  const [token, setToken] = useState<CreatedToken | null>(null);
  const task = useTask();
  const make = () =>
    task.run(async () => {
      setToken(await post<CreatedToken>('/tokens', { name, role, days: Number(days) }));
      made();
    });
  return (
    <Dialog
      title="Create token"
      width="narrow"
      onClose={close}
      foot={
        <>
          <Act kind="quiet" onClick={close}>
            Close
          </Act>
          {!token && (
            <Act kind="primary" needs="admin" busy={task.busy} onClick={make}>
              Create token
            </Act>
          )}
        </>
      }
    >
      {task.problem && <ProblemBox problem={task.problem} />}
      {token ? (
        <>
          <p>The token for {token.name}. Copy it now: it is not shown again.</p>
          <pre class="secret">{token.token}</pre>
        </>
      ) : (
        <div class="form">
          <Field
            label="Name"
            value={name}
            onInput={setName}
            hint="The owner; shown in the audit log"
          />
          <Choice label="Role" value={role} values={ROLES} onChange={setRole} />
          <Field label="Valid for (days)" value={days} onInput={setDays} inputMode="numeric" />
        </div>
      )}
    </Dialog>
  );
}

export function AuditPage() {
  const refused = whyNot('admin');
  const [pages, setPages] = useState<Page<AuditEntry>[]>([]);
  const loaded = useLoaded(refused ? null : 'audit', (signal) =>
    get<Page<AuditEntry>>('/audit?limit=200', signal),
  );
  const task = useTask();
  const known = loaded.value ? [loaded.value, ...pages] : [];
  const next = known.at(-1)?.next;
  return (
    <>
      <PageHead
        title="Audit log"
        side={
          <Act
            needs="admin"
            busy={loaded.isLoading && !refused}
            onClick={() => {
              setPages([]);
              loaded.reload();
            }}
          >
            Refresh
          </Act>
        }
      >
        <span class="muted">Changes and refused requests, newest first.</span>
      </PageHead>
      {refused && <p class="notice">{refused}</p>}
      {loaded.problem && <ProblemBox problem={loaded.problem} />}
      {task.problem && <ProblemBox problem={task.problem} />}
      {!loaded.value && !loaded.problem && !refused && <Waiting lines={10} />}
      {known.length > 0 && (
        <div class="scroll-x panel">
          <table class="plain">
            <thead>
              <tr>
                <th scope="col">Time</th>
                <th scope="col">User</th>
                <th scope="col">Role</th>
                <th scope="col">Source</th>
                <th scope="col">Action</th>
                <th scope="col">Outcome</th>
                <th scope="col">Details</th>
              </tr>
            </thead>
            <tbody>
              {known.flatMap((page, at) =>
                page.items.map((entry, line) => <AuditRow key={`${at} ${line}`} entry={entry} />),
              )}
            </tbody>
          </table>
        </div>
      )}
      {next && (
        <Act
          busy={task.busy}
          onClick={() =>
            task.run(async () => {
              const page = await get<Page<AuditEntry>>(`/audit?limit=200&cursor=${part(next)}`);
              setPages([...pages, page]);
            })
          }
        >
          Load more
        </Act>
      )}
    </>
  );
}

function AuditRow({ entry }: { entry: AuditEntry }) {
  const isDone = entry.outcome === 'done';
  const action = actionText(entry.what, entry.made);
  // The phrase of a creation names the object already.
  const created = entry.made && !action.startsWith('Create ') ? `created ${entry.made}` : '';
  return (
    <tr>
      <td class="digits">{dateTime(entry.unix_ms)}</td>
      <td>{entry.who}</td>
      <td>{entry.role ?? '–'}</td>
      <td>{entry.from ?? 'local socket'}</td>
      <td title={entry.what}>{action}</td>
      <td>
        <Status
          look={
            isDone
              ? { tone: 'ok', shape: 'check', text: `done, ${entry.status}` }
              : { tone: 'warn', shape: 'slash', text: `refused, ${entry.status}` }
          }
        />
      </td>
      <td>{entry.reason ?? created}</td>
    </tr>
  );
}
