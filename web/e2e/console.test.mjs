// Uses the console as a person does, from the login to the report. Variables select real hosts:
//   GODWIT_CONSOLE_URL, GODWIT_CONSOLE_TOKEN   the manager and an admin's token
//   GODWIT_CONSOLE_VIEWER_TOKEN   a viewer's token; without it the viewer's test is skipped
//   GODWIT_CONSOLE_VM             a running VM to move; without it a VM is created and deleted
//   GODWIT_CONSOLE_SPEC           memory and boot of that VM, JSON:
//                                 {"memory":"512MiB","kernel":…,"initrd":…,"cmdline":…}
//   GODWIT_CONSOLE_DISKS          set: the hosts are real, and create and freeze images
//   GODWIT_CONSOLE_DRAIN          the host to drain; without it the first of the list
//   GODWIT_CONSOLE_FIGURES        a directory for pictures
//   GODWIT_CONSOLE_PATIENCE_S     longest time for a move or a drain, 180
import assert from 'node:assert/strict';
import { mkdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { after, before, beforeEach, test } from 'node:test';
import { api, goTo, launch, logIn, openPage, token, url, violations } from './browser.mjs';

const patience = Number(process.env.GODWIT_CONSOLE_PATIENCE_S ?? 180) * 1000;
const figures = process.env.GODWIT_CONSOLE_FIGURES;
const spec = JSON.parse(
  process.env.GODWIT_CONSOLE_SPEC ?? '{"memory":"1GiB","kernel":"/srv/images/vmlinuz"}',
);
const made = process.env.GODWIT_CONSOLE_VM ? null : `console-${Date.now().toString(36)}`;
const vm = process.env.GODWIT_CONSOLE_VM ?? made;

let browser;
let page;
let seen;

before(async () => {
  browser = await launch();
  ({ page, seen } = await openPage(browser, { colorScheme: 'light' }));
  page.setDefaultTimeout(60_000);
  await page.addInitScript(() => {
    const real = globalThis.fetch;
    globalThis.fetch = (asked, init = {}) => {
      if (!String(asked).endsWith('/events')) return real(asked, init);
      const cut = new AbortController();
      init.signal?.addEventListener('abort', () => cut.abort());
      globalThis.cutEvents = () => cut.abort(new TypeError('cut by the test'));
      return real(asked, { ...init, signal: cut.signal });
    };
  });
});
after(() => browser?.close());
// A dialogue that a failed test left open must not fail the next test.
beforeEach(() => page.evaluate(() => document.querySelector('dialog[open]')?.close()));

async function picture(name) {
  if (!figures) return;
  mkdirSync(figures, { recursive: true });
  for (const scheme of ['light', 'dark']) {
    await page.emulateMedia({ colorScheme: scheme });
    // Canvases are drawn again after a change of the scheme.
    await page.waitForTimeout(400);
    await page.screenshot({ path: join(figures, `console-${name}-${scheme}.png`) });
  }
  await page.emulateMedia({ colorScheme: 'light' });
}

const button = (name) => page.getByRole('button', { name, exact: true });
const dialogue = () => page.getByRole('dialog');

test('a wrong token is refused with the remedy', async () => {
  await page.goto(`${url}/`);
  await page.getByLabel('Token').fill('godwit_00_11');
  await button('Log in').click();
  const alert = page.getByRole('alert');
  await alert.waitFor();
  assert.match(await alert.innerText(), /token/i);
});

test('a token logs in, for this tab alone', async () => {
  await logIn(page);
  await page.getByRole('status').filter({ hasText: 'live' }).waitFor();
  const kept = await page.evaluate(() => [
    Object.values(sessionStorage).length,
    Object.values(localStorage).join(' '),
  ]);
  assert.equal(kept[0], 1);
  assert.ok(!kept[1].includes(token));
  await page.reload();
  await page.getByRole('heading', { level: 1, name: 'Overview' }).waitFor();
});

test('the overview has the figures of the cluster', async () => {
  const cluster = await api('/cluster');
  const strip = page.locator('.figures-strip').first();
  await strip.getByText(`of ${cluster.hosts}`, { exact: false }).first().waitFor();
  assert.match(await strip.innerText(), /VMs running/);
});

test('the filter of VMs answers, and stays in the address', async () => {
  const [first] = (await api('/vms?limit=1')).items;
  await goTo(page, '/vms', 'VMs');
  await page.keyboard.press('/');
  await page.keyboard.type(first.name);
  await page.getByRole('link', { name: first.name, exact: true }).waitFor();
  assert.match(page.url(), new RegExp(`filter=${first.name}`));
  await page.reload();
  await page.getByRole('link', { name: first.name, exact: true }).waitFor();
  assert.equal(await page.getByLabel('Filter VMs').inputValue(), first.name);
  await page.getByLabel('Filter VMs').fill('');
  await picture('vms');
});

test('rows are walked through by keys', async () => {
  await goTo(page, '/vms', 'VMs');
  await page.getByRole('columnheader', { name: /Name/ }).getByRole('button').focus();
  await page.keyboard.press('ArrowDown');
  await page.waitForFunction(() => document.activeElement?.closest('[data-at="0"]'));
  await page.keyboard.press('ArrowDown');
  await page.waitForFunction(() => document.activeElement?.closest('[data-at="1"]'));
  const name = await page.evaluate(() => document.activeElement.textContent);
  await page.keyboard.press('Enter');
  await page.getByRole('heading', { level: 1, name, exact: true }).waitFor();
});

test('a VM is created', { skip: made === null }, async () => {
  await goTo(page, '/vms', 'VMs');
  await button('Create VM').click();
  await dialogue().getByLabel('Name', { exact: true }).fill('not a name');
  await dialogue().getByRole('button', { name: 'Create VM' }).first().click();
  await dialogue().getByText('Letters, digits').waitFor();
  await dialogue().getByText('Nothing to boot').waitFor();
  await dialogue().getByLabel('Name', { exact: true }).fill(vm);
  await dialogue().getByLabel('Memory', { exact: true }).fill(spec.memory);
  if (spec.kernel) {
    await dialogue().getByText('Boot a kernel directly').click();
    await dialogue().getByLabel('Kernel').fill(spec.kernel);
    if (spec.initrd) await dialogue().getByLabel('Initial RAM disk').fill(spec.initrd);
    if (spec.cmdline) await dialogue().getByLabel('Command line').fill(spec.cmdline);
  }
  await dialogue().getByLabel('Screen').selectOption('vga');
  await dialogue().getByLabel('Labels').fill('made-by=console-test');
  await dialogue().getByRole('button', { name: 'Create VM' }).first().click();
  await page.getByRole('heading', { level: 1, name: vm, exact: true }).waitFor();
  await page.locator('.page-facts').getByText('running').waitFor();
  await picture('vm');
});

test('a move shows its preflight, runs with charts and ends with a report', async () => {
  await goTo(page, `/vms/${vm}`, vm);
  await button('Move').click();
  const hosts = dialogue().getByRole('radiogroup', { name: 'Destination' });
  await hosts.getByRole('radio').first().waitFor();
  await dialogue().getByRole('row').filter({ hasText: 'vm-state' }).waitFor();
  await dialogue().getByText('Migration time').waitFor();
  await dialogue().getByText('Throttle', { exact: true }).waitFor();
  await picture('preflight');
  await dialogue()
    .getByRole('button', { name: /^Move to / })
    .click();
  await page.getByRole('heading', { level: 1, name: `Move of ${vm}` }).waitFor();
  await page.getByRole('list', { name: 'Phases' }).waitFor();
  await page.getByRole('img', { name: /^Dirty rate and bandwidth/ }).waitFor({ timeout: patience });
  await page.locator('.chart canvas').first().waitFor();
  // The picture shows the middle of the move.
  if (figures) await page.waitForTimeout(4000);
  await picture('move');
  await page.locator('.page-facts').getByText('done').waitFor({ timeout: patience });
  await page.getByRole('heading', { level: 2, name: 'Report' }).waitFor();
  const switchover = page
    .locator('.figure.big')
    .filter({ hasText: 'Switchover' })
    .locator('.number');
  await page.waitForFunction(
    (element) => /\d/.test(element.textContent),
    await switchover.elementHandle(),
  );
  await picture('report');
  const waits = page.waitForEvent('download');
  await button('Download report as JSON').click();
  const file = await waits;
  const report = JSON.parse(readFileSync(await file.path(), 'utf8'));
  assert.equal((report.report ?? report).outcome, 'completed');
});

test('the text console takes keys, and the log is read', async (context) => {
  const name =
    process.env.GODWIT_CONSOLE_VM ?? (await api('/vms?state=running&limit=1')).items[0].name;
  const document = await (await fetch(`${url}/api/openapi.json`)).json();
  if (!document.paths['/api/v1/vms/{vm}/console']) {
    context.skip('the manager has no text consoles');
    return;
  }
  await goTo(page, `/vms/${name}?tab=console`, name);
  await page.locator('.term-bar').getByText('connected', { exact: true }).waitFor();
  await page.getByRole('textbox', { name: `Text console of ${name}` }).focus();
  await page.keyboard.type('hello');
  await page.locator('.term').getByText('hello').first().waitFor();
  await page.getByRole('link', { name: 'Log', exact: true }).click();
  await page.getByRole('combobox', { name: 'Log' }).waitFor();
  await page.locator('.log, .empty').first().waitFor();
});

test('the screen is shown, and again after a move', { skip: made === null }, async (context) => {
  await goTo(page, `/vms/${vm}`, vm);
  await page.locator('.thumbnail canvas:not(.thumbnail-empty)').waitFor();
  await button(`Open the screen of ${vm}`).click();
  const bar = page.locator('.term-bar');
  await bar.getByText('connected', { exact: true }).waitFor();
  const shown = page.locator('.screen-place canvas');
  await shown.waitFor();
  const draws = () =>
    page.waitForFunction(() => {
      const canvas = document.querySelector('.screen-place canvas');
      if (!canvas?.width) return false;
      const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
      return data.some((value, at) => at % 4 < 3 && value > 0);
    });
  await draws();
  await picture('screen');
  await button('Send Control-Alt-Delete').click();
  await shown.click();
  await page.keyboard.press('Control+Shift+Tab');
  await bar.locator('button:focus').waitFor();

  // The last picture is shown from the end of one connection to the first picture of the next.
  await page.evaluate(() => {
    const last = document.querySelector('.screen-last');
    const watcher = new MutationObserver(() => {
      globalThis.screenTimes ??= [];
      globalThis.screenTimes.push([last.hidden, performance.now()]);
    });
    watcher.observe(last, { attributeFilter: ['hidden'] });
  });
  const again = page.waitForEvent('websocket', { timeout: patience });
  const host = (await api(`/vms/${vm}`)).host;
  const body = JSON.stringify({
    to: (await api('/hosts')).items.find((h) => h.name !== host).name,
  });
  const move = await api(`/vms/${vm}/moves`, { method: 'POST', body });
  await again;
  await bar.getByText('connected', { exact: true }).waitFor();
  await draws();
  await page.locator('.screen-last').waitFor({ state: 'hidden' });
  const [[, cut], [, seen]] = await page.evaluate(() => globalThis.screenTimes);
  context.diagnostic(`the screen is back ${Math.round(seen - cut)} ms after its connection ended`);
  for (;;) {
    const { state } = await api(`/moves/${move.id}`);
    if (state === 'done') break;
    assert.ok(['waiting', 'running', 'starting'].includes(state), state);
    await page.waitForTimeout(200);
  }
});

test('the history contains the move', async () => {
  await goTo(page, `/history?filter=${vm}`, 'History');
  const row = page.getByRole('row').filter({ hasText: vm });
  await row.first().waitFor();
  assert.match(await row.first().innerText(), /done/);
  await goTo(page, '/journal', 'Journal');
  await page.getByRole('row').filter({ hasText: vm }).first().waitFor();
  await picture('journal');
});

test('a dialogue closes with its page, and stays where only the query changes', async () => {
  await goTo(page, '/vms', 'VMs');
  await goTo(page, `/vms/${vm}`, vm);
  await button('Delete').click();
  await dialogue().waitFor();
  await page.evaluate(() => {
    location.hash = `${location.hash}?tab=moves`;
  });
  await page
    .getByRole('link', { name: 'Moves', exact: true, includeHidden: true })
    .and(page.locator('[aria-current]'))
    .waitFor();
  assert.equal(await dialogue().count(), 1);
  await page.goBack();
  await page.goBack();
  await page.getByRole('heading', { level: 1, name: 'VMs' }).waitFor();
  await dialogue().waitFor({ state: 'detached' });
});

test('a dialogue closes with its session', async () => {
  const made = await api('/tokens', {
    method: 'POST',
    body: JSON.stringify({ name: 'leaves', role: 'operator' }),
  });
  const other = await openPage(browser);
  await logIn(other.page, made.token);
  await goTo(other.page, `/vms/${vm}`, vm);
  await other.page.getByRole('button', { name: 'Move', exact: true }).click();
  await other.page.getByRole('dialog').waitFor();
  await api(`/tokens/${made.id}`, { method: 'DELETE' });
  await other.page.getByLabel('Token').waitFor({ timeout: 60_000 });
  assert.equal(await other.page.locator('dialog').count(), 0);
  assert.deepEqual(other.seen.broken, []);
  await other.context.close();
});

test('a drain shows its plan and empties the host', async () => {
  const host = process.env.GODWIT_CONSOLE_DRAIN ?? (await api('/hosts?limit=1')).items[0].name;
  await goTo(page, `/hosts/${host}`, host);
  await picture('host');
  await button('Drain').click();
  await dialogue().getByRole('columnheader', { name: 'Moved by' }).waitFor();
  await picture('drain-plan');
  await dialogue()
    .getByRole('button', { name: /^Drain: move/ })
    .click();
  await page.getByRole('heading', { level: 1, name: `Drain of ${host}` }).waitFor();
  await page.locator('.move-row').first().waitFor();
  if (figures) await page.waitForTimeout(8000);
  await picture('drain');
  await goTo(page, '/', 'Overview');
  await picture('overview');
  await page.goBack();
  await page.getByRole('heading', { level: 1, name: `Drain of ${host}` }).waitFor();
  await goTo(page, '/queue', 'Queue');
  await picture('queue');
  await page.goBack();
  await page
    .locator('.page-facts')
    .getByText('done', { exact: true })
    .waitFor({ timeout: patience });
  await goTo(page, `/hosts/${host}`, host);
  await page.getByText('No VMs on this host.').waitFor();
  await button('Exit maintenance').click();
  await dialogue().getByRole('button', { name: 'Exit maintenance' }).click();
  await page.locator('.page-facts').getByText('up', { exact: true }).waitFor();
});

test('a lost connection is shown and reopened, and changes made meanwhile appear', async () => {
  const host = (await api('/hosts?limit=1')).items[0].name;
  await goTo(page, '/hosts', 'Hosts');
  const row = page
    .getByRole('row')
    .filter({ has: page.getByRole('link', { name: host, exact: true }) });
  await row.getByText('up', { exact: true }).waitFor();
  await page.context().setOffline(true);
  // An offline browser opens no new connection and keeps the open one.
  await page.evaluate(() => globalThis.cutEvents());
  await page.getByText('Connection lost, reconnecting.').waitFor({ timeout: 60_000 });
  await picture('lost');
  const set = (maintenance) =>
    api(`/hosts/${host}`, { method: 'PATCH', body: JSON.stringify({ maintenance }) });
  await set(true);
  await page.context().setOffline(false);
  await row.getByText('maintenance').waitFor({ timeout: 60_000 });
  await page.getByRole('status').filter({ hasText: 'live' }).waitFor();
  await set(false);
  await row.getByText('up', { exact: true }).waitFor();
});

const PAGES = [
  ['/', 'Overview'],
  ['/vms', 'VMs'],
  ['/hosts', 'Hosts'],
  ['/queue', 'Queue'],
  ['/history', 'History'],
  ['/journal', 'Journal'],
  ['/alarms', 'Alarms'],
  ['/rules', 'Rules'],
  ['/ha', 'High availability'],
  ['/baseline', 'CPU baseline'],
  ['/limits', 'Limits'],
  ['/storage', 'Networks and datastores'],
  ['/tokens', 'Tokens'],
  ['/audit', 'Audit log'],
  [`/vms/${vm}`, vm],
];

for (const scheme of ['light', 'dark']) {
  test(`every page passes the accessibility checks, ${scheme}`, async () => {
    await page.emulateMedia({ colorScheme: scheme });
    const all = [];
    for (const [path, heading] of PAGES) {
      await goTo(page, path, heading);
      await page.waitForTimeout(150);
      for (const one of await violations(page)) all.push(`${path}: ${one}`);
    }
    await goTo(page, '/vms', 'VMs');
    await button('Create VM').click();
    await dialogue().waitFor();
    for (const one of await violations(page)) all.push(`create: ${one}`);
    await page.keyboard.press('Escape');
    await dialogue().waitFor({ state: 'detached' });
    await page.emulateMedia({ colorScheme: 'light' });
    assert.deepEqual(all, []);
  });
}

test('the focus follows the reading order', async () => {
  await goTo(page, '/vms', 'VMs');
  await page.reload();
  await page.getByRole('heading', { level: 1, name: 'VMs' }).waitFor();
  const order = [];
  for (let turn = 0; turn < 24; turn += 1) {
    await page.keyboard.press('Tab');
    order.push(
      await page.evaluate(() => {
        const element = document.activeElement;
        const shown = getComputedStyle(element);
        const isSeen = shown.outlineStyle !== 'none' && Number.parseFloat(shown.outlineWidth) > 0;
        const name = (element.getAttribute('aria-label') ?? element.textContent ?? '').trim();
        return `${name || element.id}${isSeen ? '' : ' (not seen)'}`;
      }),
    );
  }
  const at = (name) => order.findIndex((one) => one.startsWith(name));
  assert.ok(
    at('VMs') > -1 &&
      at('Log out') > at('VMs') &&
      at('Create VM') > at('Log out') &&
      at('filter') > at('Create VM'),
    order.join(', '),
  );
  assert.deepEqual(
    order.filter((one) => one.endsWith('(not seen)')),
    [],
  );
});

test('the theme can be chosen and is kept', async () => {
  const ground = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  const light = await ground();
  await page.getByLabel('Theme').selectOption('dark');
  assert.notEqual(await ground(), light);
  await page.reload();
  await page.getByRole('heading', { level: 1 }).waitFor();
  assert.notEqual(await ground(), light);
  await page.getByLabel('Theme').selectOption('system');
  assert.equal(await ground(), light);
});

test('nothing breaks on a narrow screen', async () => {
  await page.setViewportSize({ width: 390, height: 844 });
  const wide = [];
  for (const [path, heading] of PAGES) {
    await goTo(page, path, heading);
    const over = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
    if (over > 0) wide.push(`${path}: ${over} px`);
  }
  await page.setViewportSize({ width: 1280, height: 800 });
  assert.deepEqual(wide, []);
});

test('a viewer sees forbidden actions with the reason', {
  skip: !process.env.GODWIT_CONSOLE_VIEWER_TOKEN,
}, async () => {
  const other = await openPage(browser);
  await logIn(other.page, process.env.GODWIT_CONSOLE_VIEWER_TOKEN);
  const create = other.page.getByRole('button', { name: 'Create VM' });
  await create.waitFor();
  const isKnown = (await other.page.locator('.who').innerText()).includes('viewer');
  // A manager without /me refuses the action itself.
  if (isKnown) {
    assert.equal(await create.getAttribute('aria-disabled'), 'true');
    assert.match((await create.getAttribute('title')) ?? '', /role operator/);
  }
  await other.context.close();
});

test('a VM is edited, and reset', { skip: made === null }, async () => {
  await goTo(page, `/vms/${vm}`, vm);
  const save = () => dialogue().getByRole('button', { name: 'Save' }).first().click();
  const facts = page.locator('.page-facts');
  await button('Edit').click();
  await dialogue().getByText('Needs a stop; disks').waitFor();
  await dialogue().getByLabel('Labels').fill('made-by=console-test tier=front');
  await save();
  await page.getByText('tier=front').first().waitFor();

  await button('Stop').click();
  await dialogue().getByRole('checkbox').check();
  await dialogue().getByRole('button', { name: 'Stop' }).click();
  await facts.getByText('stopped').waitFor();
  await button('Edit').click();
  await dialogue().getByLabel('vCPUs', { exact: true }).fill('none');
  await dialogue().getByText('A whole number').waitFor();
  await dialogue().getByLabel('vCPUs', { exact: true }).fill('3');
  await save();
  await facts.getByText('3 vCPUs').waitFor();

  await button('Start').click();
  await facts.getByText('running').waitFor();
  await button('Restart').click();
  await dialogue().getByRole('checkbox').check();
  await dialogue().getByRole('button', { name: 'Restart' }).click();
  await dialogue().waitFor({ state: 'hidden' });
  await facts.getByText('running').waitFor();
});

test('a VM with a disk gets snapshots and two consoles, and goes with its images', {
  skip: !process.env.GODWIT_CONSOLE_DISKS,
}, async () => {
  const name = `${vm}-disk`;
  const { kernel, initrd, cmdline } = spec;
  const of = { name, memory: '256MiB', kernel, initrd, cmdline, serial_ports: 2 };
  const body = JSON.stringify({ spec: of, new_disks: [{ size: '16MiB' }], start: false });
  const made = await api('/vms', { method: 'POST', body });
  const image = made.spec.disks[0].path;
  const take = async (snapshot) => {
    await button('Take snapshot').click();
    await dialogue().getByLabel('Name', { exact: true }).fill(snapshot);
    await page.keyboard.press('Enter');
    await dialogue().waitFor({ state: 'detached' });
  };
  const row = (text) => page.getByRole('listitem').filter({ hasText: text });
  await goTo(page, `/vms/${name}?tab=snapshots`, name);
  await page.getByText('No snapshots.').waitFor();
  await take('first');
  await row('first').getByText('1 disk').waitFor();
  await take('second');
  await row('second').waitFor();
  const layered = (await api(`/vms/${name}`)).info.spec.disks[0].path;
  assert.notEqual(layered, image);
  await button('Revert to first').click();
  await dialogue().getByRole('button', { name: 'Revert' }).click();
  await dialogue().waitFor({ state: 'detached' });
  assert.notEqual((await api(`/vms/${name}`)).info.spec.disks[0].path, layered);
  await button('Delete snapshot second').click();
  await dialogue().getByRole('button', { name: 'Delete' }).click();
  await row('second').waitFor({ state: 'detached' });

  await button('Start').click();
  await page.locator('.page-facts').getByText('running').waitFor();
  await page.getByRole('link', { name: 'Text console', exact: true }).click();
  const bar = page.locator('.term-bar');
  await bar.getByText('connected', { exact: true }).waitFor();
  const second = page.waitForEvent('websocket');
  await bar.getByLabel('Serial port').selectOption('2');
  assert.match((await second).url(), /console\?port=2$/);
  await bar.getByText('connected', { exact: true }).waitFor();

  await button('Delete').click();
  await dialogue()
    .getByText(/force a stop first/)
    .click();
  await dialogue().getByText('Also delete its disks').click();
  await dialogue().getByText(image, { exact: true }).waitFor();
  await dialogue().getByRole('button', { name: 'Delete' }).click();
  await page.getByRole('heading', { level: 1, name: 'VMs' }).waitFor();
  const host = made.host;
  const left = (await api(`/hosts/${host}/disks`)).disks.map(({ path }) => path);
  assert.deepEqual(left, []);
});

test('the VM is deleted', { skip: made === null }, async () => {
  await goTo(page, `/vms/${vm}`, vm);
  await button('Delete').click();
  await dialogue()
    .getByRole('checkbox', { name: /force a stop/ })
    .check();
  await dialogue().getByRole('button', { name: 'Delete' }).click();
  await page.getByRole('heading', { level: 1, name: 'VMs' }).waitFor();
});

test('no request left the origin, and no script failed', () => {
  assert.deepEqual(seen.elsewhere, []);
  assert.deepEqual(seen.broken, []);
});
