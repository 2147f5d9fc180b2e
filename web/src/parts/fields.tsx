/** Fields of forms, each with its label, and its error or hint. */
import type { ComponentChildren } from 'preact';
import { useState } from 'preact/hooks';
import { Act } from './basics';
import { useName } from './id';

interface FieldProps {
  label: string;
  value: string;
  onInput: (value: string) => void;
  wrong?: string | null;
  hint?: string;
}

/** A line of text. `offers`: values to choose from; others are possible too. */
export function Field(
  props: FieldProps & {
    inputMode?: 'numeric';
    offers?: string[];
    isReadOnly?: boolean;
    isOff?: boolean;
  },
) {
  const id = useName();
  const note = props.wrong ?? props.hint;
  return (
    <div class="field">
      <label for={id}>{props.label}</label>
      <input
        id={id}
        type="text"
        value={props.value}
        inputMode={props.inputMode}
        list={props.offers?.length ? `${id}-offers` : undefined}
        readOnly={props.isReadOnly}
        disabled={props.isOff}
        spellcheck={false}
        autocomplete="off"
        aria-invalid={props.wrong ? true : undefined}
        aria-describedby={note ? `${id}-note` : undefined}
        onInput={(event) => props.onInput(event.currentTarget.value)}
      />
      {props.offers && props.offers.length > 0 && (
        <datalist id={`${id}-offers`}>
          {props.offers.map((offer) => (
            <option key={offer} value={offer} />
          ))}
        </datalist>
      )}
      <Note id={`${id}-note`} {...props} />
    </div>
  );
}

/** Words in a line of text, which stays as it is typed. */
export function WordsField(props: {
  label: string;
  words: readonly (string | number)[];
  onChange: (words: string[]) => void;
  hint?: string;
}) {
  const { label, onChange, hint } = props;
  const [text, setText] = useState(props.words.join(' '));
  const input = (typed: string) => {
    setText(typed);
    onChange(words(typed));
  };
  return <Field label={label} value={text} onInput={input} {...(hint ? { hint } : {})} />;
}

/** Several lines of text. */
export function TextArea(props: FieldProps & { rows?: number }) {
  const id = useName();
  return (
    <div class="field">
      <label for={id}>{props.label}</label>
      <textarea
        id={id}
        rows={props.rows ?? 3}
        value={props.value}
        spellcheck={false}
        autocomplete="off"
        aria-invalid={props.wrong ? true : undefined}
        aria-describedby={(props.wrong ?? props.hint) ? `${id}-note` : undefined}
        onInput={(event) => props.onInput(event.currentTarget.value)}
      />
      <Note id={`${id}-note`} {...props} />
    </div>
  );
}

function Note(props: { id: string; wrong?: string | null; hint?: string }) {
  const note = props.wrong ?? props.hint;
  if (!note) return null;
  return (
    <small id={props.id} class={props.wrong ? 'tone-bad' : 'muted'}>
      {note}
    </small>
  );
}

/** The error of several fields. */
export const Wrong = ({ why }: { why: string | null }) =>
  why ? (
    <small class="tone-bad" role="alert">
      {why}
    </small>
  ) : null;

/** A drop-down list. Its label is elsewhere, or `name`. */
export function Options<V extends string>(props: {
  value: V;
  values: readonly (readonly [V, string])[];
  onChange: (value: V) => void;
  id?: string;
  name?: string;
  describedBy?: string | undefined;
}) {
  return (
    <select
      id={props.id}
      value={props.value}
      aria-label={props.name}
      aria-describedby={props.describedBy}
      onChange={(event) => props.onChange(event.currentTarget.value as V)}
    >
      {props.values.map(([value, text]) => (
        <option key={value} value={value}>
          {text}
        </option>
      ))}
    </select>
  );
}

/** A choice of a few values. */
export function Select<V extends string>(props: {
  label: string;
  value: V;
  values: readonly (readonly [V, string])[];
  onChange: (value: V) => void;
  hint?: string;
}) {
  const id = useName();
  return (
    <div class="field">
      <label for={id}>{props.label}</label>
      <Options
        id={id}
        value={props.value}
        values={props.values}
        onChange={props.onChange}
        describedBy={props.hint ? `${id}-note` : undefined}
      />
      <Note id={`${id}-note`} {...(props.hint ? { hint: props.hint } : {})} />
    </div>
  );
}

export function Tick(props: {
  text: string;
  checked: boolean;
  onChange: (checked: boolean) => void;
}) {
  return (
    <label class="tick">
      <input
        type="checkbox"
        checked={props.checked}
        onChange={(event) => props.onChange(event.currentTarget.checked)}
      />
      <span>{props.text}</span>
    </label>
  );
}

/** Any number of parts of one kind, and a button that adds one. */
export function Many(props: {
  label: string;
  add: string;
  onAdd: () => void;
  children: ComponentChildren;
}) {
  return (
    <fieldset class="many">
      <legend>{props.label}</legend>
      {props.children}
      <Act onClick={props.onAdd}>{props.add}</Act>
    </fieldset>
  );
}

/** A list with one entry changed, or without it. */
export const changed = <T,>(list: T[], at: number, entry: T) =>
  list.map((one, index) => (index === at ? entry : one));
export const without = <T,>(list: T[], at: number) => list.filter((_, index) => index !== at);

/** Why a text is no number of vCPUs or the like; null where it is one. */
export const wrongCount = (text: string) =>
  /^[1-9][0-9]*$/.test(text) ? null : 'A whole number, 1 or more';

/** Why a text is no size; null where it is one. */
export const wrongSize = (text: string) =>
  /^[0-9]+(\.[0-9]+)? ?([KMGT]i?B?)?$/i.test(text) ? null : 'A size, for example 512MiB or 4GiB';

/** The first error of a text that may be empty. */
export const optional = (text: string, wrong: (text: string) => string | null) =>
  text === '' ? null : wrong(text);

/** Words, separated by spaces, commas or line ends. */
export const words = (text: string) => text.split(/[\s,]+/).filter((word) => word !== '');
