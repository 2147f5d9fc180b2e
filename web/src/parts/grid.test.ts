import { describe, expect, it } from 'vitest';
import { MOVE_COLUMNS } from '../pages/history';
import { VM_COLUMNS } from '../pages/vm-columns';
import { shownColumns } from './grid';

/** Width of a table on a screen of 390 px. */
const PHONE = 364;

describe('a narrow table', () => {
  it('keeps the columns that tell where something is', () => {
    expect(shownColumns(VM_COLUMNS, PHONE).map(({ id }) => id)).toEqual(['name', 'state', 'host']);
    expect(shownColumns(MOVE_COLUMNS, PHONE).map(({ id }) => id)).toContain('way');
  });

  it('has each place in a column of its own where there is room', () => {
    const wide = shownColumns(MOVE_COLUMNS, 1000).map(({ id }) => id);
    expect(wide).toEqual(expect.arrayContaining(['from', 'to']));
    expect(wide).not.toContain('way');
  });
});
