/** Unique element IDs. Preact's own repeat, because each dialogue is a tree of its own. */
import { useState } from 'preact/hooks';

let last = 0;

export function useName(): string {
  const [name] = useState(() => {
    last += 1;
    return `n${last}`;
  });
  return name;
}
