// Serves web/dist as the manager does and forwards /api to a manager: for a manager of an older
// build or without the files.
import { createReadStream, existsSync } from 'node:fs';
import { createServer, request } from 'node:http';
import { connect } from 'node:net';
import { extname, join, normalize } from 'node:path';
import { pipeline } from 'node:stream';

// The policy of the manager, from crates/control/src/http/web.rs.
const POLICY =
  "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data:; " +
  "connect-src 'self'; object-src 'none'; base-uri 'none'; " +
  "form-action 'self'; frame-ancestors 'none'";
const TYPES = {
  '.html': 'text/html; charset=utf-8',
  '.js': 'text/javascript',
  '.css': 'text/css',
  '.svg': 'image/svg+xml',
};
const dist = new URL('../dist', import.meta.url).pathname;
const [port = '17900', manager = 'http://127.0.0.1:7800'] = process.argv.slice(2);

const server = createServer((asked, answer) => {
  const path = new URL(asked.url, 'http://localhost').pathname;
  if (path.startsWith('/api/')) {
    const { method, headers } = asked;
    const passed = request(manager + asked.url, { method, headers }, (upstream) => {
      answer.writeHead(upstream.statusCode, upstream.headers);
      // An event stream may begin without data: send the headers at once.
      answer.flushHeaders();
      // If the manager dies meanwhile, the browser must see a broken connection: an incomplete
      // answer
      // is destroyed.
      pipeline(upstream, answer, () => undefined);
    });
    passed.on('error', () => answer.destroy());
    answer.on('close', () => passed.destroy());
    asked.pipe(passed);
    return;
  }
  const file = join(dist, normalize(path === '/' ? '/index.html' : path));
  if (!file.startsWith(dist) || !existsSync(file)) {
    answer.writeHead(404).end();
    return;
  }
  const isBrotli =
    (asked.headers['accept-encoding'] ?? '').includes('br') && existsSync(`${file}.br`);
  answer.writeHead(200, {
    'content-type': TYPES[extname(file)] ?? 'application/octet-stream',
    'content-security-policy': POLICY,
    'cache-control': path.startsWith('/assets/')
      ? 'public, max-age=31536000, immutable'
      : 'no-cache',
    ...(isBrotli ? { 'content-encoding': 'br' } : {}),
  });
  createReadStream(isBrotli ? `${file}.br` : file).pipe(answer);
});

// Text consoles: forwards the request unchanged, then bytes in both directions.
server.on('upgrade', (asked, socket, head) => {
  const { hostname, port: at } = new URL(manager);
  const passed = connect(Number(at), hostname, () => {
    const lines = [`${asked.method} ${asked.url} HTTP/1.1`];
    for (let index = 0; index < asked.rawHeaders.length; index += 2)
      lines.push(`${asked.rawHeaders[index]}: ${asked.rawHeaders[index + 1]}`);
    passed.write(`${lines.join('\r\n')}\r\n\r\n`);
    passed.write(head);
    passed.pipe(socket).pipe(passed);
  });
  passed.on('error', () => socket.destroy());
  passed.on('close', () => socket.destroySoon());
  socket.on('error', () => passed.destroy());
});
server.listen(Number(port), '127.0.0.1');
