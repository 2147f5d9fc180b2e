// Guests that another program runs: found, checked, adopted, and brought back; by keys, on a narrow
// screen, and with a role that may not. run.sh starts it with simulated hosts, the first of which
// have such guests (lab/fleet/src/server/adoption.rs).
//   GODWIT_CONSOLE_FIGURES   a directory for pictures
import assert from 'node:assert/strict';
import { mkdirSync } from 'node:fs';
import { join } from 'node:path';
import { after, before, beforeEach, test } from 'node:test';
import { api, goTo, launch, logIn, openPage, required, violations } from './browser.mjs';

const figures = process.env.GODWIT_CONSOLE_FIGURES;
const WIDE = { width: 1280, height: 800 };
const PHONE = { width: 390, height: 844 };
let browser;
let page;
let seen;
let host;
let others;

before(async () => {
  browser = await launch();
  ({ page, seen } = await openPage(browser, { colorScheme: 'light' }));
  page.setDefaultTimeout(60_000);
  await logIn(page);
  [host, ...others] = (await api('/hosts')).items.map(({ name }) => name).sort();
});
after(() => browser?.close());
// A dialogue that a failed test left open must not fail the next test.
beforeEach(() => page.evaluate(() => document.querySelector('dialog[open]')?.close()));

/** Checks the page for accessibility at both widths, and that it fits the narrow one. */
async function look(name) {
  for (const [size, viewport] of [
    ['390', PHONE],
    ['1280', WIDE],
  ]) {
    await page.setViewportSize(viewport);
    await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => done())));
    assert.deepEqual(await violations(page), [], `${name} at ${size}`);
    const beyond = await page.evaluate(
      () => document.documentElement.scrollWidth - document.documentElement.clientWidth,
    );
    assert.ok(beyond <= 0, `${name} is ${beyond} px too wide at ${size}`);
    if (!figures) continue;
    mkdirSync(figures, { recursive: true });
    await page.screenshot({ path: join(figures, `adopt-${name}-${size}.png`) });
  }
}

const button = (name) => page.getByRole('button', { name, exact: true });
const dialogue = () => page.getByRole('dialog');
const inDialogue = (name) => dialogue().getByRole('button', { name, exact: true }).first();
const found = (name = 'Found guests') => page.getByRole('table', { name });
const row = (name) =>
  found()
    .getByRole('row')
    .filter({ has: button(name) });
const passed = () => dialogue().getByText('Nothing prevents the adoption.').waitFor();
const adoption = (name) => page.getByRole('heading', { level: 1, name: `Adoption of ${name}` });

test('the list of VMs shows found guests on request, apart from the VMs', async () => {
  await goTo(page, '/vms', 'VMs');
  assert.equal(await found().count(), 0);
  await page.getByLabel('Also found guests').check();
  await page.getByText("Found guests, not Godwit's: 5").waitFor();
  assert.match(await page.evaluate(() => location.hash), /found=true/);
  await row('web').getByText('possible').waitFor();
  await row('gpu').getByText('passes hardware of the host through (and 1 more)').waitFor();
  await row('mail').getByText('shut off').waitFor();
  await row('crm').getByRole('link', { name: others[0] }).waitFor();
  await look('vms');
  // The filter of the page is theirs too.
  await page.keyboard.press('/');
  await page.keyboard.type('by:libvirt adoption:possible');
  await row('gpu').waitFor({ state: 'detached' });
  await row('db').waitFor();
  await page.keyboard.press('Escape');
  await page.getByLabel('Also found guests').uncheck();
  await found().waitFor({ state: 'detached' });
});

test('the preflight lists findings with reason and remedy, and prevents the adoption', async () => {
  await goTo(page, `/hosts/${host}`, host);
  await page.getByText("Found guests, not Godwit's: 4").waitFor();
  await button('gpu').focus();
  await page.keyboard.press('Enter');
  const findings = dialogue().getByRole('table', { name: 'What prevents the adoption' });
  await findings.getByText('passes hardware of the host through').waitFor();
  await findings.getByText('Unplug it').waitFor();
  await findings.getByText('bridge br9').waitFor();
  await inDialogue('Check again').waitFor();
  assert.equal(await inDialogue('Adopt').count(), 0);
  await look('findings');
  await page.keyboard.press('Escape');
  await dialogue().waitFor({ state: 'detached' });
  await page.waitForFunction(() => document.activeElement?.textContent === 'gpu');
  await page.keyboard.press('Enter');
  await inDialogue('Import instead').click();
  await page.getByRole('dialog', { name: 'Import VM' }).waitFor();
  assert.equal(await dialogue().getByLabel('Host', { exact: true }).inputValue(), host);
  assert.equal(await dialogue().getByLabel('Name of the domain').inputValue(), 'gpu');
  await page.keyboard.press('Escape');
  await dialogue().waitFor({ state: 'detached' });
});

test('a guest is adopted, and its page tells what it cost and what is left of it', async () => {
  await goTo(page, `/hosts/${host}`, host);
  await button('web').click();
  await passed();
  assert.equal(await dialogue().getByLabel("Remove libvirt's definition").isChecked(), false);
  // Another name needs another check.
  const [taken] = (await api(`/vms?host=${host}&limit=1`)).items;
  await dialogue().getByLabel('Name at Godwit').fill(taken.name);
  await dialogue().getByText('Not checked with these settings.').waitFor();
  await inDialogue('Check').click();
  await dialogue().getByText(`A VM "${taken.name}" exists`).waitFor();
  await dialogue().getByLabel('Name at Godwit').fill('shop');
  await page.keyboard.press('Enter');
  await passed();
  await look('dialogue');
  await inDialogue('Adopt').click();
  await adoption('shop').waitFor();
  const figures = page.locator('.figures-big');
  await figures.getByText('the vCPUs stood still').waitFor();
  assert.match(await figures.innerText(), /21\.4\s*ms/);
  await page.getByText('is off and still defined: do not start it').waitFor();
  assert.equal(await button('Undo the adoption').count(), 0);
  await look('done');
  await page.getByRole('main').getByRole('link', { name: 'shop', exact: true }).click();
  await page.getByRole('heading', { level: 1, name: 'shop', exact: true }).waitFor();
  await goTo(page, `/hosts/${host}`, host);
  await page.getByText("Found guests, not Godwit's: 3").waitFor();
});

test('an adoption is shown among the moves, and undone with one click', async () => {
  await goTo(page, '/vms?found=true', 'VMs');
  await button('db').click();
  await passed();
  await inDialogue('Adopt').click();
  await adoption('db').waitFor();
  const now = page.getByRole('list', { name: 'Phases' }).locator('[aria-current="step"]');
  await now.getByText('pre-copy').waitFor();
  await look('running');
  for (const [path, heading] of [
    ['/', 'Overview'],
    ['/queue', 'Queue'],
  ]) {
    await goTo(page, path, heading);
    const running = page.locator('.move-row').filter({ hasText: `from libvirt on ${host}` });
    await running.getByText('pre-copy').waitFor();
  }
  await look('queue');
  await goTo(page, `/hosts/${host}`, host);
  await row('db').getByRole('link', { name: 'is running' }).click();
  await button('Undo the adoption').click();
  await page.getByText('The guest runs on under libvirt').waitFor();
  assert.equal(await button('Undo the adoption').count(), 0);
  await look('undone');
  const work = (await api(`/hosts/${host}/jobs`)).map(({ kind, state }) => `${kind} ${state}`);
  assert.deepEqual(work.slice(-2), ['adoption done', 'adoption cancelled']);
  await goTo(page, '/history?of=adoptions', 'History');
  const ended = page.getByRole('table', { name: 'Ended adoptions' });
  await ended.getByRole('row').filter({ hasText: 'shop' }).getByText('done').waitFor();
  await ended.getByRole('row').filter({ hasText: 'db' }).getByText('undone').waitFor();
  await look('history');
});

test('a guest of another QEMU is adopted by its QMP socket', async () => {
  await goTo(page, `/hosts/${others[1]}`, others[1]);
  await page.getByText('libvirt runs no guests on this host.').waitFor();
  await button('Adopt by QMP socket').click();
  await dialogue().getByLabel('QMP socket').fill('100.qmp');
  await dialogue().getByText('An absolute path').waitFor();
  await dialogue().getByLabel('QMP socket').fill('/var/run/qemu-server/100.qmp');
  assert.equal(await dialogue().getByLabel("Remove libvirt's definition").count(), 0);
  await inDialogue('Check').click();
  await passed();
  await dialogue().getByText('its own QEMU').waitFor();
  await inDialogue('Close').click();
});

test('an unknown adoption and a refused request say so', async () => {
  await page.evaluate((where) => {
    location.hash = where;
  }, `/adoptions/${host}/adoption-99`);
  await page.getByRole('alert').getByText('cannot find adoption "adoption-99"').waitFor();
  await goTo(page, `/hosts/${others[0]}`, others[0]);
  await button('crm').click();
  await passed();
  await page.route('**/adoptions', (route) => route.abort());
  await inDialogue('Adopt').click();
  await dialogue().getByRole('alert').getByText('Cannot reach the manager').waitFor();
  await page.unroute('**/adoptions');
  assert.deepEqual(seen, { elsewhere: [], broken: [] });
});

test('a role below admin sees found guests and cannot adopt them', async () => {
  const { context, page: theirs } = await openPage(browser);
  await logIn(theirs, required('GODWIT_CONSOLE_VIEWER_TOKEN'));
  await goTo(theirs, `/hosts/${host}`, host);
  await theirs.getByRole('button', { name: 'gpu', exact: true }).click();
  const shown = theirs.getByRole('dialog');
  await shown.getByText('passes hardware of the host through').waitFor();
  await shown.getByText('needs the role admin').first().waitFor();
  const check = shown.getByRole('button', { name: 'Check', exact: true }).last();
  assert.equal(await check.getAttribute('aria-disabled'), 'true');
  await context.close();
});
