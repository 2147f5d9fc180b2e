/** Filters: words that must all be found, and `field:value` for one field. Pure. */

export interface Term {
  field: string | null;
  value: string;
  isNot: boolean;
}

/** Parses a filter such as `state:running host-a -label:tier=front`. */
export function parseFilter(text: string): Term[] {
  return text
    .toLowerCase()
    .split(/\s+/)
    .filter((word) => word !== '' && word !== '-')
    .map((word) => {
      const isNot = word.startsWith('-');
      const plain = isNot ? word.slice(1) : word;
      const colon = plain.indexOf(':');
      return colon > 0
        ? { field: plain.slice(0, colon), value: plain.slice(colon + 1), isNot }
        : { field: null, value: plain, isNot };
    });
}

/** A row's texts by field, in lower case. */
export type Fields = Record<string, string>;

/** Whether a row matches. A term for a field that the row lacks does not match. */
export function passes(terms: Term[], fields: Fields): boolean {
  return terms.every((term) => found(term, fields) !== term.isNot);
}

function found({ field, value }: Term, fields: Fields): boolean {
  if (field !== null) {
    const text = fields[field];
    return text?.includes(value) ?? false;
  }
  for (const name in fields) if (fields[name]?.includes(value)) return true;
  return false;
}

export function labelText(labels: Record<string, string> | undefined): string {
  if (!labels) return '';
  let text = '';
  for (const name in labels) text += `${name}=${labels[name]} `;
  return text.toLowerCase();
}
