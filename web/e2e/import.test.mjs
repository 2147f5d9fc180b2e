// Imports a VM of another platform: the check, its findings, the copy, a closed copy that is found
// again and cancelled, and a warm import in passes; exports a VM. run.sh starts it with simulated
// hosts (lab/fleet/src/server/imports.rs).
import assert from 'node:assert/strict';
import { after, before, beforeEach, test } from 'node:test';
import { api, goTo, launch, logIn, openPage, violations } from './browser.mjs';

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
beforeEach(async () => {
  await page.evaluate(() => document.querySelector('dialog[open]')?.close());
  await goTo(page, '/vms', 'VMs');
  await page.getByRole('button', { name: 'Import VM', exact: true }).click();
});

const dialogue = () => page.getByRole('dialog');
const inDialogue = (name) => dialogue().getByRole('button', { name, exact: true }).first();
const findings = () =>
  dialogue().getByRole('table', { name: 'What changes or prevents the import' });
const fill = (label, text) => dialogue().getByLabel(label, { exact: true }).fill(text);

/** Checks the page for accessibility, and that it fits a narrow screen. */
async function look(name) {
  for (const width of [390, 1280]) {
    await page.setViewportSize({ width, height: 844 });
    assert.deepEqual(await violations(page), [], `${name} at ${width}`);
    const beyond = await page.evaluate(
      () => document.documentElement.scrollWidth - document.documentElement.clientWidth,
    );
    assert.ok(beyond <= 0, `${name} is ${beyond} px too wide at ${width}`);
  }
}

async function check(path, networks = 'VM Network = lan') {
  await fill('Path of the definition', path);
  await fill('Networks', networks);
  await inDialogue('Check').click();
  await findings().waitFor();
}

test('a check lists what changes and what is refused, and creates nothing', async () => {
  await fill('Path of the definition', 'wiki.ova');
  await dialogue().getByText('An absolute path on the host').waitFor();
  assert.equal(await inDialogue('Check').getAttribute('aria-disabled'), 'true');
  await check('/srv/import/wiki.ova', '');
  await dialogue().getByRole('alert').getByText('cannot import VM "wiki"').waitFor();
  await findings().getByText('refused').waitFor();
  assert.equal(await inDialogue('Import').count(), 0);
  await look('check');
  await check('/srv/import/wiki.ova');
  await dialogue().getByText('20 GiB from /srv/import/disk1.vmdk').waitFor();
  await findings().getByText('LSI Logic becomes SATA').waitFor();
  await inDialogue('Import').waitFor();
  assert.ok(!(await api('/vms?limit=1000')).items.some(({ name }) => name === 'wiki'));
  // Another form needs another check.
  await fill('Name at Godwit', 'docs');
  await inDialogue('Check').waitFor();
});

test('a VM is imported, with the progress of its disks', async () => {
  await fill('Name at Godwit', 'docs');
  await check('/srv/import/wiki.ova');
  await inDialogue('Import').click();
  await dialogue().getByText('Copying disks').waitFor();
  await page.getByRole('heading', { level: 1, name: 'docs', exact: true }).waitFor();
  await page.locator('.page-facts').getByText('stopped').waitFor();
});

test('a closed import is found again in the queue and on its host, and cancelled', async () => {
  await fill('Name at Godwit', 'slow-wiki');
  await check('/srv/import/wiki.ova');
  const host = await dialogue().getByLabel('Host', { exact: true }).inputValue();
  await inDialogue('Import').click();
  await dialogue().getByText('Copying disks').waitFor();
  await page.keyboard.press('Escape');
  await dialogue().waitFor({ state: 'detached' });
  await goTo(page, '/queue', 'Queue');
  await look('queue');
  const row = page.locator('.move-row').filter({ hasText: `import on ${host}` });
  await row.getByRole('button', { name: 'slow-wiki' }).click();
  await dialogue().getByText('Copying disks').waitFor();
  await page.keyboard.press('Escape');
  await goTo(page, `/hosts/${host}`, host);
  const listed = page.getByRole('table', { name: `Jobs on ${host}` });
  await listed.getByRole('button', { name: 'slow-wiki' }).click();
  await inDialogue('Cancel import').click();
  await dialogue().getByText('Nothing of it remains.').waitFor();
  await inDialogue('Close').click();
  await listed.getByRole('row').filter({ hasText: 'slow-wiki' }).getByText('cancelled').waitFor();
  await look('host');
  assert.ok(!(await api('/vms?limit=1000')).items.some(({ name }) => name === 'slow-wiki'));
});

test('a disk is copied in passes while its guest runs; the last one starts the VM', async () => {
  await fill('Name at Godwit', 'erp');
  await dialogue().getByLabel('Disks', { exact: true }).selectOption('warm');
  await fill('Sources of the disks', 'erp');
  await dialogue().getByText('or a path on the host').waitFor();
  await fill('Sources of the disks', 'nbd://10.0.0.5/erp');
  await look('warm');
  await check('/srv/import/erp.xml');
  await inDialogue('Copy').click();
  await dialogue().getByText('it read 20 GiB and wrote 20 GiB.').waitFor();
  await look('pass');
  for (const [verb, pass] of [
    ['Copy again', 'again'],
    ['Cut over', 'cut-over'],
  ]) {
    await inDialogue(verb).click();
    await inDialogue('Check').click();
    await findings().waitFor();
    assert.equal(await dialogue().getByLabel('Pass', { exact: true }).inputValue(), pass);
    await inDialogue(verb).click();
    if (pass === 'again') await dialogue().getByText('and wrote 64 MiB.').waitFor();
  }
  await page.getByRole('heading', { level: 1, name: 'erp', exact: true }).waitFor();
  await page.locator('.page-facts').getByText('running').waitFor();
});

test('a stopped VM is exported, and the list of what ended leads to its files', async () => {
  await page.keyboard.press('Escape');
  await goTo(page, '/vms/docs', 'docs');
  await page.getByRole('button', { name: 'Export', exact: true }).click();
  await fill('Directory', 'export');
  await dialogue().getByText('An absolute path on the host').waitFor();
  await fill('Directory', '/srv/export');
  await dialogue().getByLabel('Format').selectOption('ova');
  await look('export');
  await inDialogue('Export').click();
  await dialogue().getByText('Copying disks').waitFor();
  await dialogue().getByText('/srv/export/docs.ova').waitFor();
  await page.keyboard.press('Escape');
  await goTo(page, '/history?of=jobs', 'History');
  const ended = page.getByRole('table', { name: 'Ended jobs' });
  const row = ended.getByRole('row').filter({ hasText: 'Export' }).filter({ hasText: 'docs' });
  await row.getByText('done').waitFor();
  await look('history');
  await row.getByRole('button', { name: 'docs' }).click();
  const left = dialogue().getByRole('table', { name: 'What the export leaves out' });
  await left.getByText('UEFI variables').waitFor();
  await look('files');
  assert.deepEqual(seen, { elsewhere: [], broken: [] });
});
