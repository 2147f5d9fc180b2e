// Imports a VM of another platform: the check, its findings, the copy, and a cancelled copy. run.sh
// starts it with simulated hosts (lab/fleet/src/server/imports.rs).
import assert from 'node:assert/strict';
import { after, before, beforeEach, test } from 'node:test';
import { api, goTo, launch, logIn, openPage, violations } from './browser.mjs';

let browser;
let page;
let seen;

before(async () => {
  browser = await launch();
  ({ page, seen } = await openPage(browser, { colorScheme: 'light' }));
  page.setDefaultTimeout(20_000);
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
  for (const width of [390, 1280]) {
    await page.setViewportSize({ width, height: 844 });
    assert.deepEqual(await violations(page), [], `import at ${width}`);
  }
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

test('an import is cancelled while its disks are copied', async () => {
  await fill('Name at Godwit', 'gone');
  await check('/srv/import/wiki.ova');
  await inDialogue('Import').click();
  await inDialogue('Cancel import').click();
  await dialogue().getByText('Nothing of it remains.').waitFor();
  assert.ok(!(await api('/vms?limit=1000')).items.some(({ name }) => name === 'gone'));
  assert.deepEqual(seen, { elsewhere: [], broken: [] });
});
