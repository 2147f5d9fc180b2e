import { expect, it } from 'vitest';
import { EventReader } from './sse';

it('puts events together whatever the pieces', () => {
  const stream =
    ': hello\n\nevent: vm\nid: 7\ndata: {"a":1}\n\n' +
    'event: missed\r\nid: 9\r\ndata: x\r\ndata: y\r\n\r\n';
  const expected = [
    { name: 'vm', data: '{"a":1}', id: '7' },
    { name: 'missed', data: 'x\ny', id: '9' },
  ];
  for (const size of [1, 3, 1000]) {
    const reader = new EventReader();
    const events = [];
    for (let at = 0; at < stream.length; at += size)
      events.push(...reader.push(stream.slice(at, at + size)));
    expect(events).toEqual(expected);
  }
});
