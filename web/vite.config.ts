import { defineConfig } from 'vitest/config';

/** The manager that `npm run dev` passes requests to. */
const manager = process.env.GODWIT_MANAGER ?? 'http://127.0.0.1:7800';

export default defineConfig({
  base: '/',
  build: {
    target: 'es2022',
    outDir: 'dist',
    assetsDir: 'assets',
    // Nothing inline: the page's policy is `default-src 'self'`.
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    reportCompressedSize: false,
  },
  server: { proxy: { '/api': { target: manager, changeOrigin: true, ws: true } } },
  // No test waits; a machine that is busy may be slow.
  test: { environment: 'node', include: ['src/**/*.test.ts'], testTimeout: 60_000 },
});
