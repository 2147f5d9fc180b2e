#!/usr/bin/env bash
# Every test. End-to-end tests use namespaces, ports and all CPUs: one test at a time. All in one call: cargo would build the
# dependencies once more, with other features, for a part of the workspace.
# Expects `make build` before it.
set -euo pipefail
cd "$(dirname "$0")/.."

${CARGO:-cargo} test --release --workspace --locked --no-fail-fast -- --test-threads=1

# The console as a person uses it; says why where it can't be.
if command -v npm >/dev/null; then
  (cd web && npm ci --no-audit --no-fund --loglevel=error && npm run --silent check && npm run --silent test && e2e/run.sh && e2e/real.sh)
else
  echo "skipped: npm is not installed, so the console is not tried in a browser (apt-get install npm)"
fi
echo "== all tests passed"
