/** Saves a file in the browser. It is built here, so that no URL ever contains the token. */
export const download = (name: string, content: unknown) =>
  downloadText(name, 'application/json', `${JSON.stringify(content, null, 2)}\n`);

export function downloadText(name: string, type: string, text: string): void {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement('a');
  link.href = url;
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
