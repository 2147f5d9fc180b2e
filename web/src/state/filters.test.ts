import { describe, expect, it } from 'vitest';
import { labelText, parseFilter, passes } from './filters';

const web = {
  name: 'web-01',
  state: 'running',
  host: 'host-a',
  label: labelText({ tier: 'front' }),
};

describe('a filter', () => {
  it('wants all of its words, wherever they stand', () => {
    expect(passes(parseFilter('WEB host-a'), web)).toBe(true);
    expect(passes(parseFilter('web host-b'), web)).toBe(false);
    expect(passes(parseFilter('  '), web)).toBe(true);
  });
  it('looks into one field where one is named', () => {
    expect(passes(parseFilter('state:run host:a'), web)).toBe(true);
    expect(passes(parseFilter('name:host-a'), web)).toBe(false);
    expect(passes(parseFilter('label:tier=front'), web)).toBe(true);
    expect(passes(parseFilter('nothing:x'), web)).toBe(false);
  });
  it('leaves out what a minus stands before', () => {
    expect(passes(parseFilter('-state:running'), web)).toBe(false);
    expect(passes(parseFilter('web -state:stopped'), web)).toBe(true);
    expect(parseFilter('-')).toEqual([]);
  });
});
