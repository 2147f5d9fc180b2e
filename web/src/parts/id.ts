/** Names for elements, no two alike in the page: Preact's own repeat where a dialogue is a tree of its own. */
import { useState } from 'preact/hooks';

let last = 0;

export function useName(): string {
  const [name] = useState(() => {
    last += 1;
    return `n${last}`;
  });
  return name;
}
