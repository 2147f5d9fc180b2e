/** How urgent a move is, or all moves of a drain: what is sent, and how it is shown. */
export const PRIORITIES = [
  ['low', 'low'],
  ['normal', 'normal'],
  ['high', 'high'],
  ['urgent', 'urgent'],
] as const;
