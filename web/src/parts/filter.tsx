/** A filter field. The filter is part of the address, so a link shows the same view. */
import { useRef } from 'preact/hooks';
import { route, setQuery } from '../state/route';
import { Options } from './fields';
import { ROW_PX } from './grid';
import { useName } from './id';
import { enterRows, openFirstRow, useKey } from './keys';

export function FilterField(props: { label: string; hint: string; shown: number; total: number }) {
  const field = useRef<HTMLInputElement>(null);
  useKey('/', () => field.current?.focus());
  const text = route.value.query.get('filter') ?? '';
  return (
    <div class="filter">
      <label class="unseen" for="filter">
        {props.label}
      </label>
      <input
        id="filter"
        ref={field}
        type="search"
        placeholder={props.hint}
        spellcheck={false}
        autocomplete="off"
        value={text}
        onInput={(event) => setQuery('filter', event.currentTarget.value)}
        onKeyDown={(event) => {
          if (event.key === 'Escape') {
            setQuery('filter', '');
            event.currentTarget.blur();
          } else if (event.key === 'ArrowDown') {
            event.preventDefault();
            enterRows(ROW_PX);
          } else if (event.key === 'Enter') openFirstRow();
        }}
      />
      <kbd aria-hidden="true">/</kbd>
      <output class="filter-count" aria-live="polite">
        {props.shown === props.total ? props.total : `${props.shown} of ${props.total}`}
      </output>
    </div>
  );
}

export function Choice<V extends string>(props: {
  label: string;
  value: V;
  values: readonly (readonly [V, string])[];
  onChange: (value: V) => void;
}) {
  const id = useName();
  return (
    <label class="choice" for={id}>
      <span>{props.label}</span>
      <Options id={id} value={props.value} values={props.values} onChange={props.onChange} />
    </label>
  );
}
