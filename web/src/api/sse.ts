/**
 * Parses server-sent events: text in, events out, no I/O. Format: WHATWG HTML standard, section
 * 9.2.
 */

export interface ServerEvent {
  name: string;
  data: string;
  id: string | null;
}

export class EventReader {
  private rest = '';
  private name = '';
  private data: string[] = [];
  private id: string | null = null;

  /** Parses the next text; returns the events that it completes. */
  push(text: string): ServerEvent[] {
    const events: ServerEvent[] = [];
    const lines = (this.rest + text).split('\n');
    this.rest = lines.pop() ?? '';
    for (const line of lines) {
      const event = this.line(line.endsWith('\r') ? line.slice(0, -1) : line);
      if (event) events.push(event);
    }
    return events;
  }

  private line(line: string): ServerEvent | null {
    if (line === '') {
      const event = { name: this.name || 'message', data: this.data.join('\n'), id: this.id };
      const isWhole = this.data.length > 0;
      this.name = '';
      this.data = [];
      return isWhole ? event : null;
    }
    const colon = line.indexOf(':');
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? '' : line.slice(line[colon + 1] === ' ' ? colon + 2 : colon + 1);
    if (field === 'event') this.name = value;
    else if (field === 'data') this.data.push(value);
    else if (field === 'id') this.id = value;
    // Comments (an empty field) are heartbeats of the manager.
    return null;
  }
}
