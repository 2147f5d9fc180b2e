#!/usr/bin/env bash
# Every test. End-to-end tests use namespaces, ports and all CPUs: one test at a time. All in one call: cargo would build the
# dependencies once more, with other features, for a part of the workspace.
# Expects `make build` before it.
set -euo pipefail
cd "$(dirname "$0")/.."

${CARGO:-cargo} test --release --workspace --locked --no-fail-fast -- --test-threads=1
echo "== all tests passed"
