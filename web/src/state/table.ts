/** Rows by name. Changes apply at once; views are notified with the next frame. */
import { type Signal, signal } from '@preact/signals';
import { onFrame } from './frames';

const BY_NAME = new Intl.Collator('en', { numeric: true });

export class Table<T> {
  private readonly rows = new Map<string, T>();
  private readonly changed: Signal<number> = signal(0);
  private names: string[] | null = null;
  private readonly notify = () => {
    this.changed.value += 1;
  };

  put(name: string, row: T): void {
    if (!this.rows.has(name)) this.names = null;
    this.rows.set(name, row);
    onFrame(this.notify);
  }

  drop(name: string): void {
    if (!this.rows.delete(name)) return;
    this.names = null;
    onFrame(this.notify);
  }

  /** Replaces all rows. */
  replace(rows: Iterable<[string, T]>): void {
    this.rows.clear();
    for (const [name, row] of rows) this.rows.set(name, row);
    this.names = null;
    onFrame(this.notify);
  }

  /** Returns a row without subscribing to changes. */
  peek(name: string): T | undefined {
    return this.rows.get(name);
  }

  get(name: string): T | undefined {
    this.changed.value;
    return this.rows.get(name);
  }

  get size(): number {
    this.changed.value;
    return this.rows.size;
  }

  /** All rows by name. The order is computed again only when a row was added or removed. */
  sorted(): T[] {
    this.changed.value;
    this.names ??= [...this.rows.keys()].sort(BY_NAME.compare);
    return this.names.map((name) => this.rows.get(name) as T);
  }

  values(): IterableIterator<T> {
    this.changed.value;
    return this.rows.values();
  }
}
