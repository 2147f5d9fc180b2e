/** Parses labels: `tier=front rack=1`. A word without `=` is a label with an empty value. */
export function readLabels(text: string): Record<string, string> {
  const words = text.split(/[\s,]+/).filter((word) => word !== '');
  return Object.fromEntries(
    words.map((word) => {
      const at = word.indexOf('=');
      return at < 0 ? [word, ''] : [word.slice(0, at), word.slice(at + 1)];
    }),
  );
}
