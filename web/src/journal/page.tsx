/** The journal: what happened in the cluster, and why. The search is part of the address. */
import { useEffect, useState } from 'preact/hooks';
import { Act, PageHead, ProblemBox, useTask } from '../parts/basics';
import { Choice } from '../parts/filter';
import { useName } from '../parts/id';
import { useKey } from '../parts/keys';
import { route, setQuery } from '../state/route';
import { KIND_NAMES } from '../text/journal';
import { exportJournal } from './export';
import { isEmpty, type Search, searchOf } from './search';
import { JournalTable, useFound } from './table';

const KINDS = [['', 'all'], ...Object.entries(KIND_NAMES)] as [string, string][];
const SEVERITIES = [
  ['', 'all'],
  ['warning', 'warnings, errors'],
  ['error', 'errors'],
] as const;

/** Wait for the next key before a search. */
const SETTLE_MS = 300;

export function JournalPage() {
  const search = searchOf(route.value.query);
  const settled = useSettled(search);
  const found = useFound(settled);
  const task = useTask();
  const [lacking, setLacking] = useState<string | null>(null);
  return (
    <div class="page-fill">
      <PageHead
        title="Journal"
        side={
          <Act
            busy={task.busy}
            blocked={found.entries.length === 0 ? 'No entries to export.' : null}
            onClick={() => task.run(async () => setLacking(await exportJournal(settled)))}
          >
            Export
          </Act>
        }
      >
        <span class="muted">What happened in the cluster, and why. The newest first, live.</span>
      </PageHead>
      {task.problem && <ProblemBox problem={task.problem} />}
      <div role="status">{lacking && !task.busy && <p class="notice">{lacking}</p>}</div>
      <SearchForm search={search} shown={found.entries.length} hasMore={found.next !== null} />
      <JournalTable found={found} search={settled} />
    </div>
  );
}

/** The entries of one object. */
export function JournalOf({ object }: { object: string }) {
  const search = { ...searchOf(new URLSearchParams()), object };
  return <JournalTable found={useFound(search)} search={search} />;
}

/** The search as it was when the last key was pressed some time ago. */
function useSettled(search: Search): Search {
  const text = JSON.stringify(search);
  const [settled, setSettled] = useState(text);
  useEffect(() => {
    const timer = setTimeout(() => setSettled(text), SETTLE_MS);
    return () => clearTimeout(timer);
  }, [text]);
  return JSON.parse(settled) as Search;
}

function SearchForm(props: { search: Search; shown: number; hasMore: boolean }) {
  const { search, shown, hasMore } = props;
  const set = (field: keyof Search) => (value: string) => setQuery(field, value);
  return (
    <form class="search" role="search" onSubmit={(event) => event.preventDefault()}>
      <TextInput label="Text" value={search.text} hint="no route" isFirst onInput={set('text')} />
      <TextInput
        label="Object"
        value={search.object}
        hint="vm:web, host:a"
        onInput={set('object')}
      />
      <Choice label="Type" value={search.kind} values={KINDS} onChange={set('kind')} />
      <Choice
        label="Severity"
        value={search.severity}
        values={SEVERITIES}
        onChange={set('severity')}
      />
      <TimeInput label="From" value={search.from} onInput={set('from')} />
      <TimeInput label="To" value={search.to} onInput={set('to')} />
      <Act
        kind="quiet"
        blocked={isEmpty(search) ? 'Nothing is searched for.' : null}
        onClick={clear}
      >
        Show all
      </Act>
      <output class="filter-count" aria-live="polite">
        {shown}
        {hasMore && ' or more'}
      </output>
    </form>
  );
}

function clear(): void {
  for (const field of Object.keys(searchOf(new URLSearchParams()))) setQuery(field, '');
}

interface InputProps {
  label: string;
  value: string;
  onInput: (value: string) => void;
}

/** `isFirst`: the key `/` goes to it. */
function TextInput(props: InputProps & { hint: string; isFirst?: boolean }) {
  const id = useName();
  useKey('/', () => (props.isFirst ? document.getElementById(id)?.focus() : false));
  return (
    <label class="choice" for={id}>
      <span>{props.label}</span>
      <input
        id={id}
        type="search"
        value={props.value}
        placeholder={props.hint}
        spellcheck={false}
        autocomplete="off"
        onInput={(event) => props.onInput(event.currentTarget.value)}
      />
    </label>
  );
}

function TimeInput(props: InputProps) {
  const id = useName();
  return (
    <label class="choice" for={id}>
      <span>{props.label}</span>
      <input
        id={id}
        type="datetime-local"
        value={props.value}
        onInput={(event) => props.onInput(event.currentTarget.value)}
      />
    </label>
  );
}
