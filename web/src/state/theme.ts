/** The theme: light, dark, or the system's. */
import { effect, signal } from '@preact/signals';

export type Theme = 'system' | 'light' | 'dark';

const KEY = 'godwit.theme';

function kept(): Theme {
  const value = localStorage.getItem(KEY);
  return value === 'light' || value === 'dark' ? value : 'system';
}

export const theme = signal<Theme>('system');
/** Increases when the colours change, so that charts are drawn again. */
export const colours = signal(0);

export function startTheme(): void {
  theme.value = kept();
  effect(() => {
    const root = document.documentElement;
    if (theme.value === 'system') delete root.dataset.theme;
    else root.dataset.theme = theme.value;
    if (theme.value === 'system') localStorage.removeItem(KEY);
    else localStorage.setItem(KEY, theme.value);
    colours.value = colours.peek() + 1;
  });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => {
    colours.value += 1;
  });
}
