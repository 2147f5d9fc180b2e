// Manages a cluster of simulated hosts as a person does: rules, limits, the CPU baseline, a VM from
// an image, a VM's devices; by keys, on a narrow screen, and after a reload. run.sh starts it.
//   GODWIT_CONSOLE_FIGURES   a directory for pictures
import assert from 'node:assert/strict';
import { mkdirSync } from 'node:fs';
import { join } from 'node:path';
import { after, before, beforeEach, test } from 'node:test';
import { api, goTo, launch, logIn, openPage, violations } from './browser.mjs';

const figures = process.env.GODWIT_CONSOLE_FIGURES;
const WIDE = { width: 1280, height: 800 };
const PHONE = { width: 390, height: 844 };
const MAC = '52:54:00:aa:bb:01';
const made = `manage-${Date.now().toString(36)}`;

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

/** Checks the page for accessibility, and keeps a picture of it. */
async function picture(name) {
  assert.deepEqual(await violations(page), [], name);
  if (!figures) return;
  mkdirSync(figures, { recursive: true });
  for (const [size, viewport] of [
    ['1280', WIDE],
    ['390', PHONE],
  ]) {
    await page.setViewportSize(viewport);
    await page.waitForTimeout(200);
    await page.screenshot({ path: join(figures, `manage-${name}-${size}.png`) });
  }
  await page.setViewportSize(WIDE);
}

const button = (name) => page.getByRole('button', { name, exact: true });
const dialogue = () => page.getByRole('dialog');
const inDialogue = (name) => dialogue().getByRole('button', { name, exact: true }).first();
const closed = () => dialogue().waitFor({ state: 'detached' });
const focused = (what) =>
  page.waitForFunction((wanted) => {
    const element = document.activeElement;
    const label = element?.labels?.[0]?.textContent ?? element?.getAttribute('aria-label');
    return (label ?? element?.textContent ?? '').trim() === wanted;
  }, what);
/** Whether the heading of the next page has the focus by the time it is in the document. */
const focusOfHeading = (text) =>
  page.evaluate(
    (wanted) =>
      new Promise((answer) => {
        new MutationObserver((_, observer) => {
          const heading = document.querySelector('main h1');
          if (heading?.textContent.trim() !== wanted) return;
          observer.disconnect();
          answer(document.activeElement === heading);
        }).observe(document.body, { childList: true, subtree: true, characterData: true });
      }),
    text,
  );
const specOf = async (vm) => (await api(`/vms/${vm}`)).info.spec;
const stoppedVm = async () => {
  const vm = (await api('/vms?state=running')).items.find((one) => one.name !== made);
  await api(`/vms/${vm.name}/stop`, { method: 'POST', body: '{"force":true}' });
  await goTo(page, `/vms/${vm.name}`, vm.name);
  await page.locator('.page-facts').getByText('stopped').waitFor();
  return vm.name;
};

test('a rule is created, changed and deleted', async () => {
  const [one, two] = (await api('/vms?limit=2')).items.map((vm) => vm.name);
  await goTo(page, '/rules', 'Rules');
  await button('Create rule').click();
  await focused('Name');
  await dialogue().getByLabel('Name', { exact: true }).fill('replicas');
  await dialogue().getByLabel('VMs', { exact: true }).fill(`${one}, nobody`);
  await dialogue().getByText('No VM has this name yet: nobody').waitFor();
  await picture('rule');
  await inDialogue('Create rule').click();
  await closed();
  const panel = page.getByRole('region', { name: 'replicas' });
  await panel.getByText('run on different hosts').waitFor();
  assert.deepEqual((await api('/rules/replicas')).vms, [one, 'nobody']);

  await button('Edit rule replicas').click();
  await focused('Constraint');
  await dialogue().getByLabel('Constraint').selectOption('on');
  await dialogue().getByLabel('VMs', { exact: true }).fill(`${one}\n${two}`);
  await inDialogue('Save').click();
  // The manager refuses a rule of this kind without hosts, and the old one is there again.
  await dialogue().getByRole('alert').getByText('Name hosts or their labels').waitFor();
  assert.equal((await api('/rules/replicas')).kind, 'apart');
  await dialogue().getByLabel('Hosts', { exact: true }).fill('host-1');
  await dialogue().getByLabel('Strength').selectOption('should');
  await inDialogue('Save').click();
  await closed();
  const rule = await api('/rules/replicas');
  assert.deepEqual([rule.kind, rule.strength, rule.vms], ['on', 'should', [one, two]]);
  await picture('rules');

  await button('Delete rule replicas').click();
  await inDialogue('Delete').click();
  await page.getByRole('region', { name: 'replicas' }).waitFor({ state: 'detached' });
});

test('limits are set, for the cluster, a datastore and a host', async () => {
  await goTo(page, '/limits', 'Limits');
  await button('Edit limits').click();
  await focused('In the cluster');
  await dialogue().getByLabel('In the cluster').fill('many');
  await dialogue().getByText('A whole number').first().waitFor();
  await dialogue().getByLabel('In the cluster').fill('17');
  await inDialogue('Add datastore').click();
  await dialogue().getByLabel('Path of datastore 1').fill('/srv/slow');
  await dialogue().getByLabel('Moves of datastore 1').fill('3');
  await picture('limits-edit');
  await inDialogue('Save').click();
  await closed();
  await page.getByText('/srv/slow').waitFor();
  const host = (await api('/hosts?limit=1')).items[0].name;
  await button('Set the limit of a host').click();
  await dialogue().getByLabel('Host', { exact: true }).selectOption(host);
  await dialogue().getByLabel('Moves in each direction').fill('2');
  await inDialogue('Save').click();
  await closed();
  await page.getByText('from: 2; to: 2').waitFor();
  await picture('limits');
  const now = await api('/limits');
  assert.equal(now.in_all, 17);
  assert.equal(now.datastores['/srv/slow'], 3);
  assert.deepEqual(now.hosts[host], { into: 2, out: 2 });

  await button(`Change the limit of ${host}`).click();
  await dialogue().getByLabel('Moves in each direction').fill('');
  await inDialogue('Save').click();
  await closed();
  await button('Edit limits').click();
  await dialogue().getByLabel('In the cluster').fill('');
  await inDialogue('Remove datastore 1').click();
  await inDialogue('Save').click();
  await closed();
  const restored = await api('/limits');
  assert.notEqual(restored.in_all, 17);
  assert.deepEqual([restored.datastores, restored.hosts], [{}, {}]);
});

test('the CPU baseline shows its consequences, is set and removed', async () => {
  await goTo(page, '/baseline', 'CPU baseline');
  await button('Set baseline').click();
  await focused('Model');
  await dialogue().getByText('To restart').waitFor();
  await dialogue().getByLabel('Model', { exact: true }).selectOption('other');
  await dialogue().getByLabel('Other model').fill('no-such-cpu');
  await dialogue().getByRole('alert').waitFor();
  await dialogue().getByLabel('Model', { exact: true }).selectOption('computed');
  await dialogue().getByText('To restart').waitFor();
  await picture('baseline-set');
  assert.equal((await api('/cpu-baseline')).baseline ?? null, null);
  await inDialogue('Set baseline').click();
  await closed();
  await page.getByText('Requested as').waitFor();
  assert.equal((await api('/cpu-baseline')).baseline.asked, 'computed');
  await picture('baseline');
  await button('Remove baseline').click();
  await inDialogue('Remove').click();
  await closed();
  await page.getByText('No baseline.').waitFor();
});

test('high availability is set, and a VM is protected', async () => {
  await goTo(page, '/ha', 'High availability');
  const before = (await api('/ha')).settings;
  await button('Edit settings').click();
  await dialogue().getByLabel('Hosts that may fail at once').fill('9');
  await dialogue().getByText('A whole number from 1 to 8').waitFor();
  await dialogue().getByLabel('Hosts that may fail at once').fill('2');
  await dialogue().getByLabel('A start that would not fit then').selectOption('refuse');
  await picture('ha-edit');
  await inDialogue('Save').click();
  await closed();
  await page.getByText('is refused', { exact: true }).waitFor();
  const set = (await api('/ha')).settings;
  assert.deepEqual([set.failures, set.admission], [2, 'refuse']);
  await api('/ha', { method: 'PUT', body: JSON.stringify(before) });

  const vm = await stoppedVm();
  await button('Edit').click();
  await dialogue().getByLabel('When its host fails').selectOption('high');
  const asked = page.waitForRequest((request) => request.method() === 'PATCH');
  await page.route(`**/api/v1/vms/${vm}`, (route) =>
    route.request().method() === 'PATCH' ? route.fulfill({ status: 204 }) : route.fallback(),
  );
  await inDialogue('Save').click();
  assert.deepEqual((await asked).postDataJSON().spec, { protect: 'high' });
  await closed();
  await page.unroute(`**/api/v1/vms/${vm}`);
  await api(`/vms/${vm}/start`, { method: 'POST', body: '{}' });
});

test('a start that would not fit after failures has a warning, until it is closed', async () => {
  const name = `${made}-protected`;
  const earlier = (await api('/ha')).settings;
  // All simulated hosts may fail: no protected VM fits anywhere then.
  const strict = { enabled: true, failures: 8, admission: 'warn' };
  const set = await api('/ha', { method: 'PUT', body: JSON.stringify(strict) });
  assert.deepEqual(set.settings, strict);
  const disks = [{ path: `/srv/shared/${name}.qcow2`, format: 'qcow2' }];
  const spec = { name, memory: '256MiB', protect: 'high', disks };
  await api('/vms', { method: 'POST', body: JSON.stringify({ spec, start: false }) });
  await goTo(page, `/vms/${name}`, name);
  await page.locator('.page-facts').getByText('stopped').waitFor();
  await button('Start').click();
  const warning = page.getByRole('status').getByText(`VM "${name}"`);
  await warning.waitFor();
  await page.locator('.page-facts').getByText('running').waitFor();
  await picture('admission');
  // It stays on other pages.
  await goTo(page, '/rules', 'Rules');
  await warning.waitFor();
  await page.getByRole('button', { name: /^Close the warning: / }).click();
  await warning.waitFor({ state: 'detached' });

  await api(`/vms/${name}?force=true`, { method: 'DELETE' });
  let restored;
  // It cannot be disabled while a VM is protected.
  for (let left = 150; left > 0 && !restored?.settings; left -= 1) {
    restored = await api('/ha', { method: 'PUT', body: JSON.stringify(earlier) });
    if (!restored.settings) await page.waitForTimeout(200);
  }
  assert.deepEqual(restored.settings, earlier);
});

test('a doubtful host waits until somebody confirms that it is off', async () => {
  const [one, two] = (await api('/hosts?limit=2')).items.map((host) => host.name);
  const [vm] = (await api('/vms?limit=1')).items.map((vm) => vm.name);
  const watching = { host: one, term: 7, phase: 'watching', heard_ms_ago: 400 };
  const host = { watchdog: true, fencing: false, datastores: ['fast'] };
  const status = {
    settings: { enabled: true, failures: 1, admission: 'warn' },
    hosts: [
      { ...host, ...watching },
      { ...host, host: two, term: 3, phase: 'doubtful', watchdog: false, heard_ms_ago: 21_000 },
    ],
    vms: [{ vm, host: two, priority: 'high', restart: `waits until host ${two} is off` }],
    own: [
      {
        vm,
        uuid: '0a1f3c52-6f0e-4c55-9d27-0d1f2f5a7f11',
        datastore: 'fast',
        term: 4,
        standing: 'doubtful',
        host: two,
        watched_by: [one],
        confirm_at: one,
      },
    ],
    own_problems: [`host ${one}: 1 VMs of datastore fast are not watched`],
    shortfall: { hosts: [one], vms: [vm], memory_bytes: 2 ** 31 },
  };
  await page.route('**/api/v1/ha', (route) => route.fulfill({ json: status }));
  await goTo(page, '/ha', 'High availability');
  await page.getByText(`After the failure of ${one}`).waitFor();
  await page.getByText(`Waits until host ${two} is off`).waitFor();
  await page.getByText(`godwit host ha confirm-off ${one} ${vm} --term 4`).waitFor();
  await page.getByText('1 VMs of datastore fast are not watched').waitFor();
  await picture('ha');
  await page.setViewportSize(PHONE);
  const beyond = await page.evaluate(() => {
    const main = document.querySelector('main');
    return main.scrollWidth - main.clientWidth;
  });
  assert.equal(beyond, 0);
  await page.setViewportSize(WIDE);

  await button(`Confirm that it is off: host ${two}`).click();
  const start = inDialogue('Start its VMs elsewhere');
  assert.equal(await start.getAttribute('aria-disabled'), 'true');
  await dialogue().getByText(`I have looked: ${two} has no power`).click();
  await picture('ha-confirm');
  const path = `**/api/v1/ha/hosts/${two}/confirm-off`;
  await page.route(path, (route) => route.fulfill({ json: status }));
  const asked = page.waitForRequest((request) => request.url().endsWith('/confirm-off'));
  await start.click();
  assert.deepEqual((await asked).postDataJSON(), { term: 3 });
  await closed();
  await page.unroute(path);

  const hosts = { [one]: 'on', [two]: 'cannot ask its device: it does not respond' };
  const devices = '**/api/v1/ha/fencing/test';
  await page.route(devices, (route) => route.fulfill({ json: { hosts } }));
  await button('Test fencing devices').click();
  await dialogue().getByText('it does not respond').waitFor();
  await picture('ha-fencing');
  await inDialogue('Close').click();
  await closed();
  await page.unroute(devices);
  await page.unroute('**/api/v1/ha');
});

test('a VM is created from an image, with the settings of its first boot', async () => {
  await goTo(page, '/vms', 'VMs');
  await button('Create VM').click();
  await focused('Name');
  await dialogue().getByLabel('Name', { exact: true }).fill(made);
  await dialogue().getByLabel('Image', { exact: true }).fill('debian.qcow2');
  await inDialogue('Create VM').click();
  await dialogue().getByText('An absolute path').waitFor();
  await dialogue().getByLabel('Image', { exact: true }).fill('/srv/vms/debian-12.qcow2');
  await dialogue().getByLabel('New disk').fill('20GiB');
  await dialogue().getByLabel('User', { exact: true }).fill('ana');
  await dialogue().getByLabel('Host name').fill('front');
  await dialogue()
    .getByLabel('SSH public keys')
    .fill('ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIA== ana');
  await dialogue().getByLabel('Network of the guest').fill('10.0.0.5/24,gateway=10.0.0.1');
  await inDialogue('Add interface').click();
  await dialogue().getByText('Addresses, VLANs, filter, MTU').click();
  await dialogue().getByLabel('MAC address').fill(MAC);
  await picture('create');
  const sent = page.waitForRequest((request) => request.url().endsWith('/vms'));
  await inDialogue('Create VM').click();
  await page.getByRole('heading', { level: 1, name: made, exact: true }).waitFor();
  assert.deepEqual((await sent).postDataJSON().new_disks, [
    { size: '20GiB', base: '/srv/vms/debian-12.qcow2', full_copy: false },
  ]);
  const spec = await specOf(made);
  assert.deepEqual([spec.nics[0].network, spec.nics[0].mac], ['lan', MAC]);
  const { user, hostname, network } = spec.cloud_init;
  assert.deepEqual([user, hostname], ['ana', 'front']);
  assert.deepEqual(network[0].addresses, ['10.0.0.5/24']);
  await picture('vm');
});

test('a stopped VM gets other interfaces, disks and options', async () => {
  const vm = await stoppedVm();
  await button('Edit').click();
  await focused('vCPUs');
  await inDialogue('Add interface').click();
  const nic = (await specOf(vm)).nics?.length ?? 0;
  const name = `interface ${nic + 1}`;
  await dialogue().getByLabel(`Model of ${name}`).selectOption('e1000e');
  await dialogue().getByLabel(`Link of ${name}`).selectOption('down');
  await dialogue().getByText('Addresses, VLANs, filter, MTU').last().click();
  await dialogue().getByLabel('MAC address').last().fill(MAC);
  await inDialogue('Add drive').click();
  const drive = dialogue().getByRole('group', { name: 'CD-ROM drives' });
  await drive.getByText('Boot order', { exact: true }).first().click();
  await drive.getByRole('textbox', { name: 'Boot order' }).fill('1');
  await dialogue().getByText('Machine', { exact: true }).click();
  await dialogue()
    .getByText(/^Page-in/)
    .click();
  await dialogue().getByText('Guest agent, watchdog').click();
  await dialogue()
    .getByText(/^Guest agent \(/)
    .click();
  await dialogue().getByLabel('Watchdog').selectOption('reset');
  await dialogue().getByLabel('Firmware').selectOption('uefi');
  await picture('edit');
  await inDialogue('Save').click();
  // The MAC address is that of another VM: the refusal names the remedy.
  const alert = dialogue().getByRole('alert');
  await alert.waitFor();
  assert.match(await alert.innerText(), new RegExp(made));
  await dialogue().getByLabel('MAC address').last().fill('52:54:00:aa:bb:02');
  await inDialogue('Save').click();
  await closed();
  const spec = await specOf(vm);
  assert.deepEqual(
    [spec.nics[nic].model, spec.nics[nic].link, spec.nics[nic].mac],
    ['e1000e', 'down', '52:54:00:aa:bb:02'],
  );
  assert.equal(spec.cdroms[0].boot_order, 1);
  assert.deepEqual(
    [spec.guest_agent, spec.watchdog, spec.firmware, spec.refuses_page_in],
    [true, 'reset', 'uefi', true],
  );
  const panel = page.getByRole('region', { name: 'Network interfaces' });
  await panel.getByText('52:54:00:aa:bb:02').waitFor();
  await button('Start').click();
  await page.locator('.page-facts').getByText('running').waitFor();
});

test('a running VM takes what can change while it runs', async () => {
  await goTo(page, `/vms/${made}`, made);
  await button('Attach disk').click();
  await focused('Image');
  assert.deepEqual(await dialogue().getByLabel('Bus').locator('option').allInnerTexts(), ['scsi']);
  await dialogue().getByLabel('Image', { exact: true }).fill('/srv/vms/data.qcow2');
  await inDialogue('Attach').click();
  await closed();
  const link = page.waitForRequest((request) => request.url().endsWith(`/vms/${made}/link`));
  await button('Set link down of interface 0').click();
  assert.deepEqual((await link).postDataJSON(), { nic: 0, link: 'down' });
});

test('a running VM gets what it takes, and the rest needs a stop', async () => {
  const name = `${made}-runs`;
  const nics = [{ network: 'lan' }];
  const spec = { name, kernel: '/srv/vmlinuz', nics, max_cpus: 4, hotplug_slots: 1 };
  await api('/vms', { method: 'POST', body: JSON.stringify({ spec, start: true }) });
  await goTo(page, `/vms/${name}`, name);
  await page.getByText('1, 1 free').waitFor();
  assert.match((await button('Detach interface 0').getAttribute('title')) ?? '', /Needs a stop/);
  await button('Attach interface').click();
  await dialogue().getByText('Addresses, VLANs, filter, MTU').click();
  await dialogue().getByLabel('VLAN', { exact: true }).fill('10');
  await dialogue().getByLabel('May send from').selectOption('mac');
  await picture('attach-nic');
  const asked = page.waitForRequest((request) => request.url().endsWith('/nics'));
  await inDialogue('Attach').click();
  const nic = { network: 'lan', vlan: 10, filter: 'mac' };
  assert.deepEqual((await asked).postDataJSON(), { action: 'attach', nic });
  await closed();

  await button('Edit').click();
  await dialogue().getByText('Needs a stop; disks').waitFor();
  for (const field of ['Memory', 'Firmware'])
    assert.ok(await dialogue().getByLabel(field, { exact: true }).isDisabled(), field);
  await dialogue().getByLabel('vCPUs', { exact: true }).fill('5');
  await dialogue().getByText('Needs a stop: more than its maximum').waitFor();
  await dialogue().getByLabel('vCPUs', { exact: true }).fill('4');
  const changed = page.waitForRequest((request) => request.method() === 'PATCH');
  await inDialogue('Save').click();
  assert.deepEqual((await changed).postDataJSON(), { spec: { vcpus: 4 }, labels: {} });
  // A simulated host takes no vCPUs while a VM runs.
  await dialogue().getByRole('alert').waitFor();
  await dialogue().getByLabel('vCPUs', { exact: true }).fill('1');
  await dialogue().getByLabel('Description').fill('The shop\nof Ana');
  await dialogue().getByLabel('Tags').fill('prod no/tag');
  await dialogue().getByText('“no/tag” is no tag').waitFor();
  await dialogue().getByLabel('Tags').fill('prod shop');
  await dialogue().getByText('Start with its host').click();
  await dialogue().getByLabel('Place in the order').fill('3');
  await picture('edit-running');
  await inDialogue('Save').click();
  await closed();
  await page.getByRole('region', { name: 'State' }).getByText('of Ana').waitFor();
  await page.getByText('yes, place 3').waitFor();
  await picture('vm-runs');
  await goTo(page, '/vms?filter=tag:shop', 'VMs');
  await page.getByRole('row').filter({ hasText: name }).getByText('prod').waitFor();
  assert.equal(await page.getByRole('row').count(), 2);
  await picture('tags');
  await api(`/vms/${name}?force=true`, { method: 'DELETE' });
});

test('a VM moves with its disks', async () => {
  const name = `${made}-disks`;
  const disks = [{ path: '/srv/web.raw', format: 'raw' }];
  const spec = { name, kernel: '/srv/vmlinuz', disks };
  await api('/vms', { method: 'POST', body: JSON.stringify({ spec, start: true }) });
  await goTo(page, `/vms/${name}`, name);
  await button('Move').click();
  await dialogue().getByText('Migration time').waitFor();
  const checked = page.waitForResponse((answer) => answer.url().includes('with_disks=true'));
  await dialogue().getByText('Move its disks too').click();
  await dialogue().getByLabel('Directory', { exact: true }).waitFor();
  await checked;
  await dialogue().getByText('Migration time').waitFor();
  await picture('move-with-disks');
  const asked = page.waitForRequest((request) => request.url().endsWith('/moves'));
  await dialogue()
    .getByRole('button', { name: /^Move to / })
    .click();
  assert.deepEqual((await asked).postDataJSON().disks, { delete_source: false, flatten: false });
  await page.getByText('Disks remaining', { exact: true }).waitFor();
  const phases = page.getByRole('list', { name: 'Phases' });
  await phases.getByText('disks', { exact: true }).waitFor();
  const report = page.getByRole('heading', { level: 2, name: 'Disks', exact: true });
  await report.waitFor({ timeout: 120_000 });
  await page.getByText('Guest writes found by', { exact: true }).waitFor();
  await page.getByText('dirty bitmaps', { exact: true }).waitFor();
  await page.getByText('Old images kept until', { exact: true }).waitFor();
  await picture('moved-with-disks');
  await api(`/vms/${name}?force=true`, { method: 'DELETE' });
});

test('a VM is made a template, and cloned', async () => {
  const vm = await stoppedVm();
  await button('Make template').click();
  await inDialogue('Make template').click();
  await closed();
  await page.locator('.page-facts').getByText('template').waitFor();
  for (const name of ['Start', 'Move', 'Rename', 'Attach disk', 'Attach interface'])
    await button(name).waitFor({ state: 'detached' });
  await picture('template');
  await button('Edit').click();
  await dialogue().getByText('The rest needs an ordinary VM').waitFor();
  assert.equal(await dialogue().getByLabel('vCPUs', { exact: true }).count(), 0);
  await dialogue().getByLabel('Description').fill('Gold');
  const named = page.waitForRequest((request) => request.method() === 'PATCH');
  await inDialogue('Save').click();
  assert.deepEqual((await named).postDataJSON(), { spec: { description: 'Gold' }, labels: {} });
  await page.keyboard.press('Escape');
  await closed();
  await button('Clone').click();
  await focused('Name');
  await dialogue().getByLabel('Name', { exact: true }).fill(`${made}-copy`);
  await dialogue().getByLabel('Number of clones').fill('2');
  await picture('clone');
  await inDialogue('Clone').click();
  await page.getByRole('heading', { level: 1, name: 'VMs' }).waitFor();
  for (const number of [1, 2])
    await page.getByRole('link', { name: `${made}-copy-${number}`, exact: true }).waitFor();
  await goTo(page, `/vms/${vm}`, vm);
  await button('Make ordinary VM').click();
  await inDialogue('Make ordinary VM').click();
  await closed();
  await button('Start').click();
  await page.locator('.page-facts').getByText('running').waitFor();
});

test('snapshots are taken, reverted to and deleted, and say what is lost', async () => {
  const vm = `${made}-copy-1`;
  // A simulated host has no snapshots.
  let all = [];
  const sent = [];
  await page.route(/\/snapshots/, (route) => {
    const request = route.request();
    const [method, path] = [request.method(), new URL(request.url()).pathname];
    if (method === 'GET') return route.fulfill({ json: all });
    sent.push(`${method} ${path.slice(path.indexOf('/snapshots'))}`);
    if (method === 'DELETE') all = [];
    if (method === 'DELETE' || path.endsWith('/revert'))
      return route.fulfill({ status: method === 'DELETE' ? 204 : 200, body: '' });
    all = [{ ...request.postDataJSON(), created_unix_ms: Date.now(), memory: true, disks: 1 }];
    return route.fulfill({ status: 201, json: all[0] });
  });
  await goTo(page, `/vms/${vm}?tab=snapshots`, vm);
  await page.getByText('No snapshots.').waitFor();
  await button('Take snapshot').click();
  await focused('Name');
  await dialogue().getByLabel('Name', { exact: true }).fill('before-upgrade');
  await page.keyboard.press('Enter');
  await closed();
  await page.getByRole('listitem').filter({ hasText: 'before-upgrade' }).waitFor();
  await picture('snapshots');
  await button('Revert to before-upgrade').click();
  await dialogue().getByText('The VM loses').waitFor();
  await dialogue().getByText('suspended afterwards').waitFor();
  await inDialogue('Revert').click();
  await closed();
  await button('Delete snapshot before-upgrade').click();
  await dialogue().getByText('cannot go back').waitFor();
  await inDialogue('Delete').click();
  await closed();
  await page.getByText('No snapshots.').waitFor();
  await page.unroute(/\/snapshots/);
  assert.deepEqual(sent, [
    'POST /snapshots',
    'POST /snapshots/before-upgrade/revert',
    'DELETE /snapshots/before-upgrade',
  ]);
});

test('the filter leads to the rows, and a dialogue gives the focus back', async () => {
  await goTo(page, '/vms', 'VMs');
  await page.keyboard.press('/');
  await focused('Filter VMs');
  await page.keyboard.type('state:running');
  await page.keyboard.press('ArrowDown');
  await page.waitForFunction(() => document.activeElement?.closest('[data-at="0"]'));
  await page.keyboard.press('ArrowDown');
  await page.waitForFunction(() => document.activeElement?.closest('[data-at="1"]'));
  await page.keyboard.press('ArrowUp');
  await page.keyboard.press('ArrowUp');
  await focused('Filter VMs');
  await page.keyboard.press('ControlOrMeta+a');
  await page.keyboard.type(made);
  await page.getByRole('link', { name: made, exact: true }).waitFor();
  const hasFocus = focusOfHeading(made);
  await page.keyboard.press('Enter');
  await page.getByRole('heading', { level: 1, name: made, exact: true }).waitFor();
  assert.equal(await hasFocus, true, 'the heading has the focus as soon as it is there');

  await button('Delete').press('Enter');
  await dialogue().waitFor();
  await page.waitForFunction(() => document.activeElement?.closest('dialog'));
  await page.keyboard.press('Escape');
  await closed();
  await focused('Delete');
  // The first field comes later than the dialogue.
  await button('Move').click();
  await page.waitForFunction(() => document.activeElement?.matches('dialog [type="radio"]'));
  await page.keyboard.press('Escape');
  await closed();
  // From the heading of a page too.
  await goTo(page, '/journal', 'Journal');
  await page.locator('[data-at="0"]').waitFor();
  await page.keyboard.press('ArrowDown');
  await page.waitForFunction(() => document.activeElement?.closest('[data-at="0"]'));
});

test('a narrow screen has a menu, and tells where a VM is', async () => {
  await page.setViewportSize(PHONE);
  await goTo(page, '/', 'Overview');
  const menu = button('Menu');
  const pages = page.getByRole('navigation', { name: 'Pages' });
  const limits = pages.getByRole('link', { name: 'Limits', exact: true });
  assert.equal(await limits.isVisible(), false);
  await menu.click();
  assert.equal(await menu.getAttribute('aria-expanded'), 'true');
  if (figures) await page.screenshot({ path: join(figures, 'manage-menu-390.png') });
  await page.keyboard.press('Escape');
  await limits.waitFor({ state: 'hidden' });
  await menu.click();
  await pages.getByRole('link', { name: /^VMs/ }).click();
  await page.getByRole('heading', { level: 1, name: 'VMs' }).waitFor();
  assert.equal(await menu.getAttribute('aria-expanded'), 'false');
  const columns = async () => page.getByRole('columnheader').allInnerTexts();
  assert.deepEqual(await columns(), ['Name', 'State', 'Host']);
  const beyond = await page.evaluate(() => {
    const grid = document.querySelector('.grid');
    return grid.scrollWidth - grid.clientWidth;
  });
  assert.equal(beyond, 0);
  if (figures) await page.screenshot({ path: join(figures, 'manage-vms-390.png') });
  await goTo(page, '/history', 'History');
  assert.ok((await columns()).includes('From → to'));
  await page.setViewportSize(WIDE);
});

test('what needs attention, and what happened, is there after a reload', async () => {
  const vm = (await api('/vms?state=running')).items.find((one) => one.name !== made);
  const to = (await api('/hosts?state=up')).items.find((host) => host.name !== vm.host).name;
  const move = await api(`/vms/${vm.name}/moves`, { method: 'POST', body: JSON.stringify({ to }) });
  const text = `${vm.name} moved from ${vm.host} to ${to}`;
  await goTo(page, '/', 'Overview');
  const events = page.getByRole('region', { name: 'Recent events' });
  await events.getByText(text).waitFor({ timeout: 120_000 });
  assert.equal((await api(`/moves/${move.id}`)).state, 'done');
  // Two VMs must not share a host, and do.
  const all = (await api('/vms?limit=1000')).items;
  const pair = all.filter((one) => one.host === all[0].host).slice(0, 2);
  const rule = { name: 'never-kept', kind: 'apart', vms: pair.map((one) => one.name) };
  await api('/rules', { method: 'POST', body: JSON.stringify(rule) });
  const attention = page.getByRole('region', { name: 'Needs attention' });
  await attention.getByText('never-kept').waitFor();

  await page.reload();
  await attention.getByText('never-kept').waitFor();
  await events.getByText(text).waitFor();
  await events.getByText('rule never-kept was created').first().waitFor();
  await picture('overview');
  await goTo(page, '/journal', 'Journal');
  const row = page.getByRole('row').filter({ hasText: text });
  await row.filter({ hasText: 'admin' }).waitFor();
  await picture('journal');
  await goTo(page, '/history', 'History');
  await page.getByRole('row').filter({ hasText: vm.name }).first().waitFor();
  await picture('history');
  await api('/rules/never-kept', { method: 'DELETE' });
});

test('a datastore gets a name, is drained while its VM runs, and takes its disk back', async () => {
  const host = (await api('/hosts?limit=1')).items[0].name;
  const vm = `${made}-disks`;
  const image = `/srv/local/${vm}.qcow2`;
  const disks = [{ path: image, format: 'qcow2' }];
  const spec = { name: vm, memory: '1GiB', kernel: '/srv/vmlinuz', disks };
  await api('/vms', { method: 'POST', body: JSON.stringify({ spec, host }) });
  const isOld = (one) => one.path === '/srv/local' && one.hosts.some((at) => at.host === host);
  const store = (await api('/datastores?limit=100')).items.find(isOld);
  await goTo(page, `/storage/${store.id}`, '/srv/local');
  await button('Edit').click();
  await focused('Name');
  await dialogue().getByLabel('Name', { exact: true }).fill('old-disks');
  await dialogue().getByLabel('Tags', { exact: true }).fill('hdd rack:1');
  await inDialogue('Save').click();
  await closed();
  await page.getByRole('heading', { level: 1, name: 'old-disks' }).waitFor();
  await button('Drain').click();
  await dialogue().getByText(image).waitFor();
  await picture('datastore-plan');
  await inDialogue('Drain: move 1 disk').click();
  await closed();
  await page.getByText('1 of 1 disk moved').waitFor();
  assert.equal((await specOf(vm)).disks[0].path, `/srv/shared/${vm}.qcow2`);
  assert.equal((await api(`/datastores/${store.id}`)).maintenance, true);
  await picture('datastore');
  await button('Undo drain').click();
  await inDialogue('Undo drain').click();
  await closed();
  await page.getByText('undone', { exact: true }).waitFor();
  assert.equal((await specOf(vm)).disks[0].path, image);
  await goTo(page, '/storage', 'Networks and datastores');
  await page.getByRole('link', { name: 'old-disks', exact: true }).waitFor();
  const pool = page.getByRole('row').filter({ hasText: 'rbd:vms' });
  await pool.getByText('ceph-rbd', { exact: true }).waitFor();
  await pool.getByText('30 TiB free of 40 TiB').waitFor();
  await picture('datastores');
  await page.getByRole('link', { name: 'rbd:vms', exact: true }).click();
  await page.getByRole('heading', { level: 1, name: 'rbd:vms' }).waitFor();
  await page.getByText('No VM has a disk in it.').waitFor();
  const reset = { name: '', tags: [], description: '', maintenance: false };
  await api(`/datastores/${store.id}`, { method: 'PATCH', body: JSON.stringify(reset) });
  await api(`/vms/${vm}?force=true`, { method: 'DELETE' });
});

test('a viewer sees who may change rules, limits and the baseline', {
  skip: !process.env.GODWIT_CONSOLE_VIEWER_TOKEN,
}, async () => {
  const other = await openPage(browser);
  await logIn(other.page, process.env.GODWIT_CONSOLE_VIEWER_TOKEN);
  for (const [path, heading, name] of [
    ['/rules', 'Rules', 'Create rule'],
    ['/limits', 'Limits', 'Edit limits'],
    ['/ha', 'High availability', 'Edit settings'],
    ['/baseline', 'CPU baseline', 'Set baseline'],
  ]) {
    await goTo(other.page, path, heading);
    const act = other.page.getByRole('button', { name, exact: true });
    await act.waitFor();
    assert.equal(await act.getAttribute('aria-disabled'), 'true');
    assert.match((await act.getAttribute('title')) ?? '', /role admin/);
  }
  assert.deepEqual(other.seen.broken, []);
  await other.context.close();
});

test('the VM is deleted with its disks, after a look at what goes and what stays', async () => {
  const [base, own] = ['/srv/vms/debian-12.qcow2', '/srv/vms/own.qcow2'];
  const images = { deleted: [own], kept: [{ path: base, why: 'it is a base of another image' }] };
  await page.route(/\/images$/, (route) => route.fulfill({ json: images }));
  await goTo(page, `/vms/${made}`, made);
  await button('Delete').click();
  await dialogue()
    .getByText(/force a stop first/)
    .click();
  await dialogue().getByText('Also delete its disks').click();
  await dialogue().getByText(own).waitFor();
  await dialogue().getByText('it is a base of another image').waitFor();
  await picture('delete');
  const asked = page.waitForRequest((request) => request.method() === 'DELETE');
  await inDialogue('Delete').click();
  assert.match((await asked).url(), /\?force=true&delete_disks=true$/);
  await page.getByRole('heading', { level: 1, name: 'VMs' }).waitFor();
  for (const number of [1, 2])
    await api(`/vms/${made}-copy-${number}?force=true`, { method: 'DELETE' });
});

test('no request left the origin, and no script failed', () => {
  assert.deepEqual(seen.elsewhere, []);
  assert.deepEqual(seen.broken, []);
});
