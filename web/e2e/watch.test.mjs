// Watches a cluster of simulated hosts as a person does: charts of load, the journal, alarms, VMs
// that crashed or whose host is away, the chains of disks. run.sh starts it.
//   GODWIT_CONSOLE_FIGURES   a directory for pictures
import assert from 'node:assert/strict';
import { mkdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { after, before, beforeEach, test } from 'node:test';
import { api, goTo, launch, logIn, openPage, violations } from './browser.mjs';

const figures = process.env.GODWIT_CONSOLE_FIGURES;
const made = `watch-${Date.now().toString(36)}`;
const rule = `${made}-apart`;
/** A rule is broken for a minute before there is an alarm. */
const ALARM_MS = 150_000;

let browser;
let page;
let seen;

before(async () => {
  browser = await launch();
  ({ page, seen } = await openPage(browser, { colorScheme: 'light' }));
  page.setDefaultTimeout(60_000);
  await logIn(page);
});
after(() => browser?.close());
// A dialogue that a failed test left open must not fail the next test.
beforeEach(() => page.evaluate(() => document.querySelector('dialog[open]')?.close()));

/** Checks the page for accessibility, light and dark, and keeps pictures of it. */
async function picture(name) {
  for (const colorScheme of ['dark', 'light']) {
    await page.emulateMedia({ colorScheme });
    assert.deepEqual(await violations(page), [], `${name}, ${colorScheme}`);
    if (!figures) continue;
    mkdirSync(figures, { recursive: true });
    await page.waitForTimeout(300);
    await page.screenshot({ path: join(figures, `watch-${name}-${colorScheme}.png`) });
  }
}

const button = (name) => page.getByRole('button', { name, exact: true });
const dialogue = () => page.getByRole('dialog');
const inDialogue = (name) => dialogue().getByRole('button', { name, exact: true }).first();
const closed = () => dialogue().waitFor({ state: 'detached' });
const region = (name) => page.getByRole('region', { name, exact: true });
/** A running VM that no other test has made. */
const runningVm = async () =>
  (await api('/vms?state=running&limit=1000')).items.find((one) => one.name.startsWith('vm-'));
const chart = (name) => page.getByRole('img', { name });

test('a broken rule is made, for an alarm', async () => {
  const all = (await api('/vms?limit=1000')).items;
  const pair = all.filter((one) => one.host === all[0].host).slice(0, 2);
  const body = { name: rule, kind: 'apart', vms: pair.map((one) => one.name) };
  await api('/rules', { method: 'POST', body: JSON.stringify(body) });
});

test('load is charted for a VM, a host, a datastore and the cluster', async () => {
  const vm = await runningVm();
  await goTo(page, `/vms/${vm.name}?tab=load`, vm.name);
  // The first samples come some seconds after the hosts; the charts load again by themselves.
  await chart(/^CPU, of 2 cores: used [0-9.]+ cores/).waitFor({ timeout: 60_000 });
  for (const name of [/^Memory, of .*: used/, /^Network: received .*sent/])
    await chart(name).waitFor();
  // Most of the hour is before the manager began: a gap.
  await chart(/^CPU.*with gaps/).waitFor();
  await page.locator('.chart-place canvas').first().waitFor();
  await picture('load-vm');
  for (const range of ['Day', 'Year']) {
    const asked = page.waitForRequest((request) => request.url().includes('/load?'));
    await button(range).click();
    const query = new URL((await asked).url()).searchParams;
    assert.equal(query.get('resolution'), range === 'Day' ? '1min' : '1h');
    assert.match(page.url(), new RegExp(`range=${range.toLowerCase()}`));
    assert.equal(await button(range).getAttribute('aria-pressed'), 'true');
  }
  await goTo(page, `/hosts/${vm.host}`, vm.host);
  await chart(/^CPU, of 32 cores: used/).waitFor({ timeout: 60_000 });
  await picture('load-host');
  const store = (await api('/datastores?limit=100')).items.find(
    ({ path }) => path === '/srv/shared',
  );
  await goTo(page, `/storage/${store.id}`, store.name);
  await chart(/^Disk latency: mean/).waitFor({ timeout: 60_000 });
  await picture('load-datastore');
  await goTo(page, '/', 'Overview');
  await chart(/^CPU, of .* cores: used/).waitFor({ timeout: 60_000 });
  assert.equal(await chart(/^Disk latency/).count(), 0);
});

test('a gap in the load is not drawn over', async () => {
  const vm = await runningVm();
  const mean = [1500, 1500, 1500, null, null, null, 1500, null, 1500, 1500];
  const json = {
    object: `vm:${vm.name}`,
    resolution: '5s',
    from_unix_ms: Date.now() - 50_000,
    step_ms: 5000,
    points: mean.length,
    capacity: {},
    series: [{ metric: 'cpu_used_millicores', mean, max: mean }],
  };
  await page.route(/\/load\?/, (route) => route.fulfill({ json }));
  await goTo(page, '/vms', 'VMs');
  await goTo(page, `/vms/${vm.name}?tab=load`, vm.name);
  await chart('CPU: used 1.50 cores; with gaps').waitFor();
  await page.locator('.chart-place canvas').waitFor();
  // Columns of the canvas with the colour of the line, at the height of the line or above.
  const isDrawn = await page.waitForFunction(() => {
    const canvas = document.querySelector('.chart-place canvas');
    const drawn = canvas?.getContext('2d')?.getImageData(0, 0, canvas.width, canvas.height);
    if (!drawn) return null;
    const axis = 72 * devicePixelRatio;
    const columns = [];
    for (let x = axis; x < canvas.width; x += 1) {
      let most = 0;
      for (let y = 0; y < canvas.height / 2; y += 1) {
        const at = (y * canvas.width + x) * 4;
        const [red, , blue, alpha] = drawn.data.slice(at, at + 4);
        if (alpha > 128 && blue - red > 60) most = Math.max(most, alpha);
      }
      columns.push(most > 0);
    }
    return columns.some(Boolean) ? columns : null;
  });
  const columns = await isDrawn.jsonValue();
  const at = (share) => columns[Math.round(share * columns.length)];
  // Points 0 to 2 and 8 to 9 are lines; 3 to 5 are missing.
  assert.deepEqual([at(0.1), at(0.42), at(0.93)], [true, false, true]);
  // Point 6 stands alone.
  const some = (from, to) =>
    columns.slice(from * columns.length, to * columns.length).some(Boolean);
  assert.deepEqual([some(0.5, 0.6), some(0.6, 0.72), some(0.75, 0.83)], [false, true, false]);
  await picture('load-gap');
  await page.unroute(/\/load\?/);
});

test('the journal is searched, goes on while it is shown, and is exported', async () => {
  await goTo(page, '/journal', 'Journal');
  const row = (text) => page.getByRole('row').filter({ hasText: text });
  await row(rule).first().waitFor();
  await page.getByLabel('Object', { exact: true }).fill(`rule:${rule}`);
  await page.waitForFunction((name) => {
    const rows = [...document.querySelectorAll('[role="row"][data-at]')];
    return rows.length > 0 && rows.every((one) => one.textContent.includes(name));
  }, rule);
  assert.match(page.url(), /object=rule/);
  await page.reload();
  await row(rule).first().waitFor();
  assert.equal(await page.getByLabel('Object', { exact: true }).inputValue(), `rule:${rule}`);
  await button('Show all').click();
  const vm = await runningVm();
  await page.getByLabel('Text', { exact: true }).fill(`${vm.name} stopped`);
  await api(`/vms/${vm.name}/stop`, { method: 'POST', body: '{"force":true}' });
  await row(`${vm.name} stopped`).first().waitFor();
  await page
    .getByRole('button', { name: new RegExp(`${vm.name} stopped`) })
    .first()
    .click();
  await dialogue().getByText('Severity', { exact: true }).waitFor();
  await dialogue().getByRole('link', { name: vm.name, exact: true }).waitFor();
  await picture('journal-entry');
  await inDialogue('Close').click();
  await closed();
  await api(`/vms/${vm.name}/start`, { method: 'POST', body: '{}' });
  const type = page.locator('label').filter({ has: page.getByText('Type', { exact: true }) });
  await type.locator('select').selectOption('vm-stopped');
  const saved = page.waitForEvent('download');
  await button('Export').click();
  const lines = readFileSync(await (await saved).path(), 'utf8')
    .trim()
    .split('\n')
    .map(JSON.parse);
  assert.ok(lines.length > 0 && lines.every((one) => one.kind === 'vm-stopped'));
  assert.ok(lines[0].objects.includes(`vm:${vm.name}`));
  await picture('journal');
  await goTo(page, `/vms/${vm.name}?tab=journal`, vm.name);
  await row(`${vm.name} stopped`).first().waitFor();
  assert.equal(await row(rule).count(), 0);
});

test('an alarm is counted, acknowledged with a note, and ends with its cause', async () => {
  const pages = page.getByRole('navigation', { name: 'Pages' });
  await pages
    .getByRole('link', { name: /^Alarms\s*[1-9]\d* open$/ })
    .waitFor({ timeout: ALARM_MS });
  await goTo(page, '/alarms', 'Alarms');
  await page.getByLabel('Filter alarms').fill(rule);
  const row = page.getByRole('row').filter({ hasText: rule });
  await row.getByText('warning').waitFor({ timeout: ALARM_MS });
  await picture('alarms');
  await button(`Acknowledge the alarm of rule:${rule}`).click();
  await dialogue().getByLabel('Note').fill('a host is on its way');
  await picture('alarm-acknowledge');
  await inDialogue('Acknowledge').click();
  await closed();
  await row.getByText('a host is on its way').waitFor();
  const kept = (await api('/alarms?limit=1000')).items.find((one) => one.object === `rule:${rule}`);
  assert.equal(kept.acknowledged.note, 'a host is on its way');
  await button('Test receivers').click();
  await dialogue().getByText('No receivers.').waitFor();
  await page.keyboard.press('Escape');
  await closed();
  await api(`/rules/${rule}`, { method: 'DELETE' });
  await row.waitFor({ state: 'detached', timeout: ALARM_MS });
});

test('a VM has a policy for crashes, and VMs that start before it', async () => {
  const disks = [{ path: `/srv/local/${made}.qcow2`, format: 'qcow2' }];
  const spec = { name: made, memory: '1GiB', kernel: '/srv/vmlinuz', disks };
  await api('/vms', { method: 'POST', body: JSON.stringify({ spec }) });
  const first = (await api('/vms?limit=1')).items[0].name;
  await goTo(page, `/vms/${made}`, made);
  await button('Edit').click();
  await dialogue().getByLabel('After a crash').selectOption('times');
  await dialogue().getByLabel('Restarts within an hour').fill('0');
  await dialogue().getByText('A whole number from 1 to 100').first().waitFor();
  await dialogue().getByLabel('Restarts within an hour').fill('5');
  await dialogue().getByText('Start with its host').click();
  await dialogue().getByLabel('After the VMs').fill(first);
  await picture('crash-policy');
  await inDialogue('Save').click();
  await closed();
  const state = region('State');
  await state.getByText('is restarted, at most 5 times within an hour').waitFor();
  await state.getByRole('link', { name: first, exact: true }).waitFor();
  const now = (await api(`/vms/${made}`)).info.spec;
  assert.deepEqual([now.on_crash, now.autostart.after], [{ times: 5 }, [first]]);
});

test('the last crash of a VM is shown', async () => {
  const vm = await api(`/vms/${made}`);
  vm.info.last_crash = { at_unix_ms: Date.now(), how: 'panic', restarts: 2, restarting: true };
  const ofVm = new RegExp(`/vms/${made}$`);
  await page.route(ofVm, (route) => route.fulfill({ json: vm }));
  await goTo(page, '/vms', 'VMs');
  await goTo(page, `/vms/${made}`, made);
  await region('State')
    .getByText(/the guest panicked; 2 restarts within an hour; waits for its restart/)
    .waitFor();
  await page.unroute(ofVm);
});

test('a disk is shown with the images below it', async () => {
  await goTo(page, '/vms', 'VMs');
  await goTo(page, `/vms/${made}`, made);
  const disks = region('Disks');
  await disks.getByText('qcow2, 20 GiB, 2 GiB used').waitFor();
  const chain = disks.getByRole('list', { name: `Backing files of /srv/local/${made}.qcow2` });
  await chain.getByText('/srv/local/debian-12.qcow2').waitFor();
  await chain.getByText('qcow2, 20 GiB, 1 GiB used').waitFor();
  await picture('chain');
  await api(`/vms/${made}?force=true`, { method: 'DELETE' });
});

test('VMs of a host that is away are unknown, not running', async () => {
  const vms = await api('/vms?limit=1000');
  const { host } = vms.items[0];
  const gone = vms.items.filter((one) => one.host === host);
  for (const vm of gone) vm.is_current = false;
  const hosts = await api('/hosts?limit=1000');
  Object.assign(
    hosts.items.find((one) => one.name === host),
    { state: 'away', reason: 'no route to host' },
  );
  await page.route(/\/vms\?limit=1000$/, (route) => route.fulfill({ json: vms }));
  await page.route(/\/hosts\?limit=1000$/, (route) => route.fulfill({ json: hosts }));
  await page.reload();
  await goTo(page, '/', 'Overview');
  await page.getByText(`of ${vms.total}, ${gone.length} unknown`).waitFor();
  const attention = region('Needs attention');
  await attention.getByText(new RegExp(`no route to host.*${gone.length} VM`)).waitFor();
  await attention.getByText(new RegExp(gone[0].name)).waitFor();
  await picture('unknown');
  await goTo(page, `/vms?filter=state:unknown`, 'VMs');
  await page.getByText(`${gone.length} of ${vms.total}`, { exact: true }).waitFor();
  await goTo(page, `/vms?filter=state:running+host:${host}`, 'VMs');
  await page.getByText(`0 of ${vms.total}`, { exact: true }).waitFor();
  await page.unrouteAll();
  await page.reload();
});

test('no request left the origin, and no script failed', () => {
  assert.deepEqual(seen.elsewhere, []);
  assert.deepEqual(seen.broken, []);
});
