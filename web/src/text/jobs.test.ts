import { expect, it } from 'vitest';
import { cancelledText, jobName, jobTitle, nounOf, passText, progressText, shareOf } from './jobs';

it('names jobs, their progress and what they left', () => {
  expect(jobTitle('warm-import', jobName({ vm: 'erp', place: '/srv/erp.xml' }))).toBe(
    'Warm import of erp',
  );
  expect(jobName({ vm: '', place: '/srv/erp.xml' })).toBe('/srv/erp.xml');
  expect(progressText(2 ** 30, 20 * 2 ** 30)).toBe('1 GiB of 20 GiB');
  expect([progressText(0, 0), shareOf(0, 0), shareOf(1, 4)]).toEqual(['not started', 0, 0.25]);
  expect(cancelledText('export')).toBe('The export is cancelled. Nothing of it remains.');
  expect([nounOf('disk-move'), nounOf('warm-import')]).toEqual(['move', 'import']);
  expect(cancelledText('warm-import')).toContain('earlier passes stay');
  expect(passText({ id: '1', state: 'done', done_bytes: 2 ** 30, written_bytes: 2 ** 16 })).toBe(
    'The pass is done: it read 1 GiB and wrote 64 KiB.',
  );
});
