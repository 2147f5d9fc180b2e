/** The frame of all pages: navigation, connection state, session. */
import { useEffect, useLayoutEffect, useRef, useState } from 'preact/hooks';
import { AdoptionPage } from './adoption/page';
import { AlarmsPage } from './alarms/page';
import { openHelp } from './dialogs/help';
import { HaPage } from './ha/page';
import { JournalPage } from './journal/page';
import { AuditPage, TokensPage } from './pages/access';
import { BaselinePage } from './pages/baseline';
import { DatastorePage } from './pages/datastore';
import { DrainPage } from './pages/drain';
import { HistoryPage } from './pages/history';
import { HostPage } from './pages/host';
import { HostsPage } from './pages/hosts';
import { LimitsPage } from './pages/limits';
import { LoginPage } from './pages/login';
import { MovePage } from './pages/move';
import { OverviewPage } from './pages/overview';
import { QueuePage } from './pages/queue';
import { RulesPage } from './pages/rules';
import { StoragePage } from './pages/storage';
import { VmPage } from './pages/vm';
import { VmsPage } from './pages/vms';
import { Act, Link, PageHead, Waiting } from './parts/basics';
import { Bird } from './parts/bird';
import { useKey } from './parts/keys';
import { Mark, Status } from './parts/status';
import { adoptionOf } from './state/adoptions';
import { alarms, openAlarms } from './state/alarms';
import { hosts, isLoaded, isOver, moves, rules, vms } from './state/cluster';
import { go, page, route } from './state/route';
import { isKnown, logOut, me, tryNow } from './state/session';
import { connection } from './state/stream';
import { type Theme, theme } from './state/theme';
import { closeWarning, warnings } from './state/warnings';

export function App() {
  if (!isKnown.value) return null;
  if (!me.value) return <LoginPage />;
  return (
    <div class="frame">
      <a class="skip" href="#main" onClick={skip}>
        Skip to content
      </a>
      <SideBar />
      <div class="body">
        <TopBar />
        <Main />
      </div>
    </div>
  );
}

function skip(event: Event): void {
  event.preventDefault();
  document.getElementById('main')?.focus();
}

function Main() {
  const main = useRef<HTMLElement>(null);
  const where = page.value;
  const isFirst = useRef(true);
  // A new page starts at its top. Focus on the heading lets screen readers announce it. Before the
  // page is painted: later, it would take the focus from what the user has gone to since.
  useLayoutEffect(() => {
    if (isFirst.current) {
      isFirst.current = false;
      return;
    }
    main.current?.scrollTo(0, 0);
    main.current?.querySelector<HTMLElement>('h1')?.focus({ preventScroll: true });
  }, [where]);
  return (
    <main id="main" ref={main} tabIndex={-1}>
      <Warnings />
      {isLoaded.value ? <Page key={where} /> : <Waiting lines={12} />}
    </main>
  );
}

/** What the manager warned of: over the page that is open when the answer arrives. */
function Warnings() {
  return (
    <div role="status">
      {warnings.value.map((text) => (
        <p class="notice" key={text}>
          Warning: {text}{' '}
          <Act kind="quiet" name={`Close the warning: ${text}`} onClick={() => closeWarning(text)}>
            Close
          </Act>
        </p>
      ))}
    </div>
  );
}

function Page() {
  const [first, second, third] = route.value.parts;
  const title = [second, first].filter(Boolean).join(' · ');
  useEffect(() => {
    document.title = title ? `${title} · Godwit` : 'Godwit';
  }, [title]);
  switch (first) {
    case undefined:
      return <OverviewPage />;
    case 'hosts':
      return second ? <HostPage name={second} /> : <HostsPage />;
    case 'vms':
      return second ? <VmPage name={second} /> : <VmsPage />;
    case 'moves':
      return second ? <MovePage id={second} /> : <QueuePage />;
    case 'drains':
      return second ? <DrainPage id={second} /> : <HistoryPage />;
    case 'adoptions':
      return second && third ? <AdoptionPage host={second} id={third} /> : <HistoryPage />;
    case 'queue':
      return <QueuePage />;
    case 'history':
      return <HistoryPage />;
    case 'journal':
      return <JournalPage />;
    case 'alarms':
      return <AlarmsPage />;
    case 'ha':
      return <HaPage />;
    case 'rules':
      return <RulesPage />;
    case 'storage':
      return second ? <DatastorePage id={second} /> : <StoragePage />;
    case 'baseline':
      return <BaselinePage />;
    case 'limits':
      return <LimitsPage />;
    case 'tokens':
      return <TokensPage />;
    case 'audit':
      return <AuditPage />;
    default:
      return (
        <PageHead title="Page not found">
          <Link to="/">Overview</Link>
        </PageHead>
      );
  }
}

/** Pages by the key that opens them after `g`. */
const KEYS: Record<string, string> = {
  o: '/',
  v: '/vms',
  h: '/hosts',
  q: '/queue',
  y: '/history',
  j: '/journal',
  a: '/alarms',
  r: '/rules',
  l: '/limits',
};

function SideBar() {
  const [isGoing, setGoing] = useState(false);
  const [isOpen, setOpen] = useState(false);
  const where = page.value;
  useEffect(() => setOpen(false), [where]);
  useKey('Escape', () => (isOpen ? setOpen(false) : false));
  const nav = useRef<HTMLElement>(null);
  useEffect(() => {
    if (!isOpen) return;
    const pressed = (event: Event) => {
      if (!nav.current?.contains(event.target as Node)) setOpen(false);
    };
    addEventListener('pointerdown', pressed);
    return () => removeEventListener('pointerdown', pressed);
  }, [isOpen]);
  useKey('g', () => setGoing(true));
  useKey('?', openHelp);
  useEffect(() => {
    if (!isGoing) return;
    const pressed = (event: KeyboardEvent) => {
      setGoing(false);
      const path = KEYS[event.key];
      if (path) {
        event.preventDefault();
        go(path);
      }
    };
    addEventListener('keydown', pressed, { once: true });
    return () => removeEventListener('keydown', pressed);
  }, [isGoing]);
  return (
    <nav ref={nav} class={isOpen ? 'side side-open' : 'side'} aria-label="Pages">
      <a class="brand" href="#/" aria-label="Godwit">
        <Bird />
        <span>Godwit</span>
      </a>
      <button
        type="button"
        class="act menu"
        aria-expanded={isOpen}
        aria-controls="pages"
        onClick={() => setOpen(!isOpen)}
      >
        <svg viewBox="0 0 12 12" width="12" height="12" aria-hidden="true">
          <path d="M1 2.5h10M1 6h10M1 9.5h10" class="stroke" />
        </svg>
        Menu
      </button>
      <Pages />
    </nav>
  );
}

/** All pages. On a narrow screen they are behind the button of the menu. */
function Pages() {
  let waiting = 0;
  let running = 0;
  for (const move of moves.values()) {
    if (move.state === 'waiting') waiting += 1;
    else if (move.state === 'running' || move.state === 'starting') running += 1;
  }
  const alarm = openAlarms(alarms.values());
  const broken = rules.sorted().filter((rule) => rule.state === 'broken').length;
  return (
    <div id="pages" class="pages">
      <ul>
        <Item path="/" text="Overview" />
        <Item path="/vms" text="VMs" count={vms.size} />
        <Item path="/hosts" text="Hosts" count={hosts.size} />
        <Item
          path="/alarms"
          text="Alarms"
          count={alarm.open > 0 ? `${alarm.open} open` : undefined}
          tone={alarm.isCritical ? 'bad' : 'warn'}
        />
        <Item path="/journal" text="Journal" />
      </ul>
      <h2>Moves</h2>
      <ul>
        <Item
          path="/queue"
          text="Queue"
          count={running + waiting}
          tone={running > 0 ? 'live' : undefined}
        />
        <Item path="/history" text="History" />
      </ul>
      <h2>Cluster</h2>
      <ul>
        <Item path="/rules" text="Rules" count={broken > 0 ? `${broken} broken` : undefined} />
        <Item path="/ha" text="High availability" />
        <Item path="/baseline" text="CPU baseline" />
        <Item path="/limits" text="Limits" />
        <Item path="/storage" text="Networks, datastores" />
      </ul>
      <h2>Access</h2>
      <ul>
        <Item path="/tokens" text="Tokens" />
        <Item path="/audit" text="Audit log" />
      </ul>
    </div>
  );
}

function Item(props: {
  path: string;
  text: string;
  count?: number | string | undefined;
  tone?: 'live' | 'warn' | 'bad' | undefined;
}) {
  const here = `/${route.value.parts[0] ?? ''}`;
  const isHere = here === props.path || listOf(here) === props.path;
  return (
    <li>
      <a href={`#${props.path}`} aria-current={isHere ? 'page' : undefined}>
        <span>{props.text}</span>
        {props.count !== undefined && (
          <span class={`count ${props.tone ?? ''}`}>{props.count}</span>
        )}
      </a>
    </li>
  );
}

/** The list that contains a single move, adoption or drain. */
function listOf(here: string): string | null {
  if (here === '/drains') return '/history';
  if (here === '/adoptions') {
    const [, host = '', id = ''] = route.value.parts;
    return adoptionOf(host, id)?.state === 'running' ? '/queue' : '/history';
  }
  if (here !== '/moves') return null;
  const move = moves.get(route.value.parts[1] ?? '');
  return move && isOver(move) ? '/history' : '/queue';
}

const THEMES: [Theme, string][] = [
  ['system', 'Theme: system'],
  ['light', 'Theme: light'],
  ['dark', 'Theme: dark'],
];

function TopBar() {
  const who = me.value;
  const isLost = connection.value.state === 'lost' || connection.value.state === 'trying';
  return (
    <header class={isLost ? 'top top-lost' : 'top'}>
      <ConnectionMark />
      <span class="grow" />
      <button
        type="button"
        class="act quiet"
        onClick={openHelp}
        aria-label="Keyboard shortcuts and symbols"
      >
        ?
      </button>
      <label class="theme">
        <span class="unseen">Theme</span>
        <select
          value={theme.value}
          onChange={(event) => (theme.value = event.currentTarget.value as Theme)}
        >
          {THEMES.map(([value, text]) => (
            <option key={value} value={value}>
              {text}
            </option>
          ))}
        </select>
      </label>
      <span class="who">
        {who?.name} <span class="muted">{who?.role}</span>
      </span>
      <button type="button" class="act quiet" onClick={logOut}>
        Log out
      </button>
    </header>
  );
}

/**
 * Connection state. It is shown in the top bar, so that a lost connection does not shift the page.
 */
function ConnectionMark() {
  const now = connection.value;
  if (now.state === 'lost' || now.state === 'trying') {
    return (
      <div class="lost" role="alert">
        <Mark tone="bad" shape="triangle" />
        <span class="lost-text" title={now.why}>
          <strong>Connection lost, reconnecting.</strong> {now.why} The page shows the last known
          state.
        </span>
        <button type="button" class="act" onClick={tryNow} aria-disabled={now.state === 'trying'}>
          Reconnect now
        </button>
      </div>
    );
  }
  const look =
    now.state === 'live'
      ? ({ tone: 'ok', shape: 'disc', text: 'live' } as const)
      : ({ tone: 'busy', shape: 'half', text: 'loading' } as const);
  return (
    <span class="connection" role="status">
      <Status look={look} />
    </span>
  );
}
