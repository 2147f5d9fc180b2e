/**
 * Modal dialogues on the browser's `<dialog>`: the focus begins in the first field, Escape closes,
 * and the focus returns.
 */
import { effect } from '@preact/signals';
import type { ComponentChildren } from 'preact';
import { render } from 'preact';
import { useEffect, useRef } from 'preact/hooks';
import { page } from '../state/route';
import { me } from '../state/session';
import { useName } from './id';

const FIELDS = ['input', 'select', 'textarea']
  .map((field) => `.dialog-body ${field}:not(:disabled, [readonly])`)
  .join(',');

export function Dialog(props: {
  title: string;
  onClose: () => void;
  children: ComponentChildren;
  foot: ComponentChildren;
  width?: 'narrow' | 'wide';
}) {
  const dialog = useRef<HTMLDialogElement>(null);
  const id = useName();
  // What got the focus for want of a field, until the first field is there.
  const before = useRef<Element | null>(null);
  useEffect(() => {
    const element = dialog.current;
    if (!element) return;
    const opens = !element.open;
    if (opens) element.showModal();
    else if (before.current === null || document.activeElement !== before.current) return;
    const field = element.querySelector<HTMLElement>(FIELDS);
    before.current = field ? null : element.querySelector('.dialog-foot button');
    if (field) field.focus();
    else if (opens && before.current instanceof HTMLElement) before.current.focus();
  });
  return (
    <dialog
      ref={dialog}
      class={`dialog ${props.width ?? ''}`}
      aria-labelledby={id}
      onClose={props.onClose}
    >
      <header class="dialog-head">
        <h2 id={id}>{props.title}</h2>
        <button
          type="button"
          class="act quiet close"
          aria-label="Close"
          onClick={() => dialog.current?.close()}
        >
          <svg viewBox="0 0 12 12" width="12" height="12" aria-hidden="true">
            <path d="M2 2l8 8M10 2l-8 8" class="stroke" />
          </svg>
        </button>
      </header>
      <div class="dialog-body">{props.children}</div>
      <footer class="dialog-foot">{props.foot}</footer>
    </dialog>
  );
}

/**
 * Opens a dialogue over the current page; `make` receives the function that closes it. The dialogue
 * closes when the page or the session changes.
 */
export function open(make: (close: () => void) => ComponentChildren): void {
  const back = document.activeElement;
  const place = document.createElement('div');
  document.body.append(place);
  const close = () => {
    // A dialogue that navigates when it is done is closed twice: by the navigation and by itself.
    if (!place.isConnected) return;
    unfollow();
    render(null, place);
    place.remove();
    const isThere = back instanceof HTMLElement && back.isConnected && back !== document.body;
    const to = isThere ? back : document.querySelector<HTMLElement>('main h1');
    to?.focus({ preventScroll: true });
  };
  const who = me.peek();
  const where = page.peek();
  const unfollow = effect(() => {
    // Not within the effect: closing reads other signals.
    if (me.value !== who || page.value !== where) queueMicrotask(close);
  });
  render(make(close), place);
}
