/** The keys, and what the shapes mean. */
import { Act } from '../parts/basics';
import { Dialog, open } from '../parts/dialog';
import { type Look, Status } from '../parts/status';

const KEYS: [string, string][] = [
  ['/', 'to the filter'],
  ['Esc', 'out of the filter, out of a dialogue'],
  ['↑ ↓ PgUp PgDn Home End', 'from row to row'],
  ['Enter', 'opens the row'],
  ['g o', 'overview'],
  ['g v', 'VMs'],
  ['g h', 'hosts'],
  ['g q', 'queue'],
  ['g y', 'history'],
  ['g e', 'events'],
  ['g r', 'rules'],
  ['g l', 'limits'],
  ['?', 'this'],
];

const SHAPES: Look[] = [
  { tone: 'ok', shape: 'disc', text: 'runs, is up' },
  { tone: 'ok', shape: 'check', text: 'done, passes' },
  { tone: 'busy', shape: 'arrow', text: 'moves' },
  { tone: 'busy', shape: 'half', text: 'begins or ends' },
  { tone: 'warn', shape: 'bars', text: 'paused' },
  { tone: 'warn', shape: 'square', text: 'in maintenance, stays' },
  { tone: 'warn', shape: 'triangle', text: 'warns; red: in doubt' },
  { tone: 'bad', shape: 'cross', text: 'failed, away' },
  { tone: 'idle', shape: 'ring', text: 'stopped, waits' },
  { tone: 'idle', shape: 'slash', text: 'cancelled, ruled out' },
  { tone: 'idle', shape: 'query', text: 'not known' },
];

export const openHelp = () =>
  open((close) => (
    <Dialog
      title="Keys and shapes"
      onClose={close}
      foot={
        <Act kind="primary" onClick={close}>
          Close
        </Act>
      }
    >
      <div class="help">
        <dl>
          {KEYS.map(([keys, text]) => (
            <div key={keys}>
              <dt>
                {keys.split(' ').map((key) => (
                  <kbd key={key}>{key}</kbd>
                ))}
              </dt>
              <dd>{text}</dd>
            </div>
          ))}
        </dl>
        <ul>
          {SHAPES.map((look) => (
            <li key={look.text}>
              <Status look={look} />
            </li>
          ))}
        </ul>
      </div>
    </Dialog>
  ));
