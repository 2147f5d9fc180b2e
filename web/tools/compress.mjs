// Writes .br and .gz beside each file of dist, so that the manager never compresses anything
// itself. The output is deterministic.
import { readdirSync, readFileSync, statSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { brotliCompressSync, constants, gzipSync } from 'node:zlib';

const dist = new URL('../dist', import.meta.url).pathname;
const isText = /\.(html|js|css|svg|json)$/;

function files(folder) {
  return readdirSync(folder).flatMap((name) => {
    const path = join(folder, name);
    return statSync(path).isDirectory() ? files(path) : [path];
  });
}

let whole = 0;
for (const path of files(dist).filter((path) => isText.test(path))) {
  const content = readFileSync(path);
  const params = {
    [constants.BROTLI_PARAM_QUALITY]: 11,
    [constants.BROTLI_PARAM_SIZE_HINT]: content.length,
  };
  const brotli = brotliCompressSync(content, { params });
  writeFileSync(`${path}.br`, brotli);
  writeFileSync(`${path}.gz`, gzipSync(content, { level: 9 }));
  whole += brotli.length;
  console.log(
    `${path.slice(dist.length + 1).padEnd(40)} ${String(content.length).padStart(8)} B, ` +
      `${brotli.length} B in brotli`,
  );
}
console.log(`total: ${(whole / 1000).toFixed(1)} kB in brotli`);
