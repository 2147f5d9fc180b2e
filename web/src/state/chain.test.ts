import { describe, expect, it } from 'vitest';
import type { DiskInfo } from '../api/types';
import { backingPath, chain } from './chain';

const images: Record<string, Partial<DiskInfo>> = {
  '/srv/web.qcow2': { backing: '/srv/bases/golden.qcow2' },
  '/srv/bases/golden.qcow2': { backing: '../debian.qcow2' },
  '/srv/debian.qcow2': {},
  '/srv/loop.qcow2': { backing: 'loop.qcow2' },
  '/srv/cut.qcow2': { backing: '/mnt/away.qcow2' },
};
const describeImage = async (path: string) => {
  const found = images[path];
  if (!found) throw new Error(`no image ${path}`);
  return { path, virtual_bytes: 0, used_bytes: 0, ...found } as DiskInfo;
};
const paths = async (image: string) => (await chain(image, describeImage)).map(({ path }) => path);

describe('a chain', () => {
  it('has the image, its backing file, and those below it', async () => {
    expect(await paths('/srv/web.qcow2')).toEqual([
      '/srv/web.qcow2',
      '/srv/bases/golden.qcow2',
      '/srv/debian.qcow2',
    ]);
    expect(await paths('/srv/debian.qcow2')).toEqual(['/srv/debian.qcow2']);
  });

  it('ends at an image that cannot be described, and says why', async () => {
    const links = await chain('/srv/cut.qcow2', describeImage);
    expect(links.at(-1)).toEqual({ path: '/mnt/away.qcow2', problem: 'no image /mnt/away.qcow2' });
  });

  it('ends if it returns to an image, and if it is too long', async () => {
    const links = await chain('/srv/loop.qcow2', describeImage);
    expect(links.map(({ problem }) => problem)).toEqual([
      undefined,
      'The chain returns to this image.',
    ]);
    let number = 0;
    const endless = await chain('/a', async (path) => {
      number += 1;
      return { path, backing: `/a${number}`, virtual_bytes: 0, used_bytes: 0 } as DiskInfo;
    });
    expect([number, endless.length]).toEqual([32, 33]);
  });
});

describe('a backing file', () => {
  it('is named from the directory of its image', () => {
    expect(backingPath('/srv/a.qcow2', 'b.qcow2')).toBe('/srv/b.qcow2');
    expect(backingPath('/srv/vms/a.qcow2', '.././b//c.qcow2')).toBe('/srv/b/c.qcow2');
    expect(backingPath('/a.qcow2', '../../../b')).toBe('/b');
    expect(backingPath('/srv/a.qcow2', '/mnt/b.qcow2')).toBe('/mnt/b.qcow2');
    expect(backingPath('/srv/a.qcow2', 'rbd:pool/b')).toBe('rbd:pool/b');
    expect(backingPath('rbd:pool/a', 'rbd:pool/b')).toBe('rbd:pool/b');
  });
});
