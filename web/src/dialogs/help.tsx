/** Help: keyboard shortcuts and symbols. */
import { Act } from '../parts/basics';
import { Dialog, open } from '../parts/dialog';
import { type Look, Status } from '../parts/status';

const KEYS: [string, string][] = [
  ['/', 'go to the filter'],
  ['Esc', 'leave the filter; close a dialogue'],
  ['↑ ↓ PgUp PgDn Home End', 'move between rows'],
  ['Enter', 'open the row'],
  ['g o', 'overview'],
  ['g v', 'VMs'],
  ['g h', 'hosts'],
  ['g q', 'queue'],
  ['g y', 'history'],
  ['g j', 'journal'],
  ['g a', 'alarms'],
  ['g r', 'rules'],
  ['g l', 'limits'],
  ['?', 'this help'],
];

const SHAPES: Look[] = [
  { tone: 'ok', shape: 'disc', text: 'running, up' },
  { tone: 'ok', shape: 'check', text: 'done, passed' },
  { tone: 'busy', shape: 'arrow', text: 'moving' },
  { tone: 'busy', shape: 'half', text: 'starting or stopping' },
  { tone: 'warn', shape: 'bars', text: 'paused' },
  { tone: 'warn', shape: 'square', text: 'in maintenance; stays' },
  { tone: 'warn', shape: 'triangle', text: 'warning; red: in doubt' },
  { tone: 'bad', shape: 'cross', text: 'failed, not responding' },
  { tone: 'idle', shape: 'ring', text: 'stopped, waiting' },
  { tone: 'idle', shape: 'bars', text: 'suspended' },
  { tone: 'idle', shape: 'square', text: 'template' },
  { tone: 'idle', shape: 'slash', text: 'cancelled, ruled out' },
  { tone: 'idle', shape: 'query', text: 'unknown' },
];

export const openHelp = () =>
  open((close) => (
    <Dialog
      title="Keyboard shortcuts and symbols"
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
