/** Dialogues on the platform's own `<dialog>`: the rest of the page is out of reach, Escape closes, focus goes back. */
import { effect } from '@preact/signals';
import type { ComponentChildren } from 'preact';
import { render } from 'preact';
import { useEffect, useRef } from 'preact/hooks';
import { page } from '../state/route';
import { me } from '../state/session';
import { useName } from './id';

export function Dialog(props: {
  title: string;
  onClose: () => void;
  children: ComponentChildren;
  foot: ComponentChildren;
  width?: 'narrow' | 'wide';
}) {
  const dialog = useRef<HTMLDialogElement>(null);
  const id = useName();
  useEffect(() => {
    const element = dialog.current;
    if (element && !element.open) element.showModal();
  }, []);
  return (
    <dialog ref={dialog} class={`dialog ${props.width ?? ''}`} aria-labelledby={id} onClose={props.onClose}>
      <header class="dialog-head">
        <h2 id={id}>{props.title}</h2>
        <button type="button" class="act quiet close" aria-label="Close" onClick={() => dialog.current?.close()}>
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
 * Opens a dialogue over whatever page is shown; it is told how to close itself. It belongs to that page and to who is logged in: where either is
 * another, it is closed.
 */
export function open(make: (close: () => void) => ComponentChildren): void {
  const back = document.activeElement;
  const place = document.createElement('div');
  document.body.append(place);
  const close = () => {
    // One that went to another page when it was done is closed by that, and then by itself.
    if (!place.isConnected) return;
    unfollow();
    render(null, place);
    place.remove();
    if (back instanceof HTMLElement && back.isConnected) back.focus();
  };
  const who = me.peek();
  const where = page.peek();
  const unfollow = effect(() => {
    // Not within the effect: what is closed there reads other signals.
    if (me.value !== who || page.value !== where) queueMicrotask(close);
  });
  render(make(close), place);
}
