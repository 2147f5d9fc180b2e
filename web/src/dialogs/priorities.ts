/** Priorities of a move or of all moves of a drain: API value and label. */
export const PRIORITIES = [
  ['low', 'low'],
  ['normal', 'normal'],
  ['high', 'high'],
  ['urgent', 'urgent'],
] as const;
