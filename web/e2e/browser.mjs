// The browser of the tests: the distribution's Chromium, and a page that records its requests and
// errors.
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { chromium } from 'playwright-core';

const axe = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');

export const url = required('GODWIT_CONSOLE_URL').replace(/\/$/, '');
export const token = required('GODWIT_CONSOLE_TOKEN');

export function required(name) {
  const value = process.env[name];
  if (!value) throw new Error(`${name} is not set: run web/e2e/run.sh, or see docs/console.md`);
  return value;
}

export function launch(...args) {
  return chromium.launch({
    executablePath: process.env.GODWIT_CONSOLE_CHROMIUM ?? '/usr/bin/chromium',
    // Chromium's sandbox does not work as root, as in CI's containers; the page is our own.
    args: ['--no-sandbox', ...args],
  });
}

export async function openPage(browser, options = {}) {
  const context = await browser.newContext({
    viewport: { width: 1280, height: 800 },
    acceptDownloads: true,
    // Node checks its own requests against that authority; the browser knows only the system's.
    ignoreHTTPSErrors: Boolean(process.env.NODE_EXTRA_CA_CERTS),
    ...options,
  });
  const page = await context.newPage();
  const seen = { elsewhere: [], broken: [] };
  page.on('request', (request) => {
    const { protocol, host } = new URL(request.url());
    if (!['blob:', 'data:'].includes(protocol) && host !== new URL(url).host)
      seen.elsewhere.push(request.url());
  });
  page.on('pageerror', (error) => seen.broken.push(String(error.stack ?? error)));
  page.on('console', (message) => {
    if (message.type() === 'error' && /Content Security Policy|Refused to/.test(message.text()))
      seen.broken.push(message.text());
  });
  return { context, page, seen };
}

export async function logIn(page, as = token) {
  await page.goto(`${url}/`);
  await page.getByLabel('Token').fill(as);
  await page.getByRole('button', { name: 'Log in' }).click();
  await page.getByRole('heading', { level: 1, name: 'Overview' }).waitFor({ timeout: 60_000 });
}

/** Goes to a page of the console and waits for its heading. */
export async function goTo(page, path, heading) {
  await page.evaluate((where) => {
    location.hash = where;
  }, path);
  await page.getByRole('heading', { level: 1, name: heading }).waitFor();
}

/** A request to the manager, beside the console. */
export async function api(path, init = {}) {
  const headers = { authorization: `Bearer ${token}`, 'content-type': 'application/json' };
  const answer = await fetch(`${url}/api/v1${path}`, { headers, ...init });
  return answer.status === 204 ? null : answer.json();
}

/** What axe-core finds on the page, one text for each rule. */
export async function violations(page) {
  await page.evaluate(axe);
  const found = await page.evaluate(() =>
    globalThis.axe.run(document, { runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa'] }),
  );
  return found.violations.map(
    ({ id, nodes }) =>
      `${id}: ${nodes
        .map((node) => node.html.slice(0, 120))
        .slice(0, 4)
        .join(' | ')}`,
  );
}
