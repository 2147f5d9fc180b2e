// Measures the console in a browser against a manager with many VMs. Prints JSON; docs/console.md
// explains the figures.
import { launch, logIn, openPage, token, url } from './browser.mjs';

const minutes = Number(process.env.MINUTES ?? 30);
const wanted = Number(process.env.MOVES ?? 20);
const patienceMs = 60_000;

async function api(path, init = {}) {
  const headers = { authorization: `Bearer ${token}`, 'content-type': 'application/json' };
  const ask = () => fetch(`${url}/api/v1${path}`, { headers, ...init });
  // The manager may close an idle connection just as it is used again; one move more or less does
  // not matter.
  const answer = await ask().catch(ask);
  return answer.json();
}

// Starts a new move for each that ends, so that the number stays constant. The manager chooses
// hosts.
let turn = 0;
let isOver = false;
const names = (await api('/vms?limit=1000')).items.map((vm) => vm.name);
async function keepMoving() {
  while (!isOver) {
    const { moves_running: running, moves_waiting: waiting } = await api('/cluster');
    for (let more = running + waiting; more < wanted + 4; more += 1) {
      await api(`/vms/${names[turn % names.length]}/moves`, { method: 'POST', body: '{}' });
      turn += 7;
    }
    await new Promise((resolve) => setTimeout(resolve, 500));
  }
}

const browser = await launch('--js-flags=--expose-gc');
const { context, page, seen } = await openPage(browser);
const devtools = await context.newCDPSession(page);
await devtools.send('Network.enable');
let loadedBytes = 0;
const kinds = new Map();
devtools.on('Network.responseReceived', ({ requestId, response }) =>
  kinds.set(requestId, response.url),
);
devtools.on('Network.loadingFinished', ({ requestId, encodedDataLength }) => {
  const path = new URL(kinds.get(requestId) ?? url).pathname;
  if (!path.startsWith('/api/')) loadedBytes += encodedDataLength;
});

async function firstPaint() {
  await page.goto(`${url}/`);
  await page.waitForFunction(
    () => performance.getEntriesByName('first-contentful-paint').length > 0,
    null,
    {
      timeout: patienceMs,
    },
  );
  return page.evaluate(() => performance.getEntriesByName('first-contentful-paint')[0].startTime);
}

const paints = [];
for (let time = 0; time < 5; time += 1) {
  await devtools.send('Network.clearBrowserCache');
  paints.push(await firstPaint());
}
// Counts loaded bytes from here on, each file once, including parts that load when first shown.
await devtools.send('Network.clearBrowserCache');
loadedBytes = 0;
await logIn(page);
const began = performance.now();
await page.reload();
await page.locator('.figures-strip').waitFor({ timeout: patienceMs });
const untilShownMs = performance.now() - began;

const moving = keepMoving();
await page.waitForTimeout(3000);

/** Time from a key to the frame after the one with its result. */
async function keystrokes() {
  await page.evaluate(() => {
    location.hash = '/vms';
  });
  await page.getByLabel('Filter VMs').focus();
  await page.evaluate(() => {
    globalThis.strokes = [];
    document.getElementById('filter').addEventListener('keydown', () => {
      const at = performance.now();
      requestAnimationFrame(() => {
        const channel = new MessageChannel();
        // A message posted in a frame arrives after that frame has been drawn.
        channel.port1.onmessage = () => globalThis.strokes.push(performance.now() - at);
        channel.port2.postMessage(null);
      });
    });
  });
  for (const key of [
    'v',
    'm',
    '-',
    '0',
    '0',
    '4',
    '1',
    'Backspace',
    'Backspace',
    'Backspace',
    '7',
    '2',
  ]) {
    await page.keyboard.press(key);
    await page.waitForTimeout(120);
  }
  const strokes = await page.evaluate(() => globalThis.strokes);
  await page.getByLabel('Filter VMs').fill('');
  return strokes.sort((a, b) => a - b);
}
const strokes = await keystrokes();

async function heapBytes() {
  await devtools.send('HeapProfiler.collectGarbage');
  const { usedSize } = await devtools.send('Runtime.getHeapUsage');
  return usedSize;
}

// Walks through the pages as a person does: lists, charts, moves.
const round = ['/', '/vms', '/queue', '/hosts', '/journal', '/history'];
const heap = [];
const until = Date.now() + minutes * 60_000;
let step = 0;
let frames = 0;
await page.evaluate(() => {
  globalThis.longTasks = [];
  new PerformanceObserver((list) => {
    for (const one of list.getEntries()) globalThis.longTasks.push(one.duration);
  }).observe({ entryTypes: ['longtask'] });
});
while (Date.now() < until) {
  const running = (await api('/moves?state=running&limit=1')).items?.[0];
  const path = step % 7 === 6 && running ? `/moves/${running.id}` : round[step % round.length];
  await page.evaluate((where) => {
    location.hash = where;
  }, path);
  frames += await page.evaluate(
    () =>
      new Promise((resolve) => {
        const end = performance.now() + 3000;
        let count = 0;
        const frame = (now) => {
          count += 1;
          if (now < end) requestAnimationFrame(frame);
          else resolve(count);
        };
        requestAnimationFrame(frame);
      }),
  );
  if (step % round.length === round.length - 1)
    heap.push({
      at_s: Math.round((minutes * 60_000 - (until - Date.now())) / 1000),
      bytes: await heapBytes(),
    });
  step += 1;
}
const longTasks = await page.evaluate(() => globalThis.longTasks);
const state = await page.locator('.connection').innerText();
isOver = true;
await moving;
await browser.close();

/**
 * Growth in bytes a minute, by least squares over the second half. The first half fills caches and
 * bounded lists, which is not growth.
 */
function growth(points) {
  const half = points.slice(Math.floor(points.length / 2));
  if (half.length < 3) return null;
  const mean = (of) => half.reduce((sum, point) => sum + of(point), 0) / half.length;
  const x = mean((point) => point.at_s);
  const y = mean((point) => point.bytes);
  const over = half.reduce((sum, point) => sum + (point.at_s - x) * (point.bytes - y), 0);
  const under = half.reduce((sum, point) => sum + (point.at_s - x) ** 2, 0);
  return (over / under) * 60;
}

const tenth = (value) => Math.round(value * 10) / 10;
paints.sort((a, b) => a - b);
console.log(
  JSON.stringify(
    {
      vms: names.length,
      moves_kept_running: wanted,
      moves_begun: Math.round(turn / 7),
      first_paint_ms: { median: tenth(paints[2]), most: tenth(paints[4]) },
      login_kept_until_figures_shown_ms: tenth(untilShownMs),
      keystroke_ms: {
        median: tenth(strokes[strokes.length >> 1]),
        most: tenth(strokes.at(-1)),
        count: strokes.length,
      },
      loaded_bytes_compressed: loadedBytes,
      watched_minutes: minutes,
      frames_per_s: tenth(frames / (step * 3)),
      long_tasks: { count: longTasks.length, most_ms: tenth(Math.max(0, ...longTasks)) },
      heap_bytes: heap,
      heap_growth_bytes_per_minute: growth(heap) === null ? null : Math.round(growth(heap)),
      connection_at_the_end: state.trim(),
      requests_elsewhere: seen.elsewhere.length,
      errors: seen.broken,
    },
    null,
    2,
  ),
);
