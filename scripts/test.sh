#!/usr/bin/env bash
# Every test. End-to-end tests use namespaces, ports and all CPUs: one test at a time.
# Expects `make build` before it.
set -euo pipefail
cd "$(dirname "$0")/.."
CARGO=${CARGO:-cargo}

echo "== unit and property tests"
$CARGO test --release --workspace --locked --exclude godwit-lab
echo "== the lab and the end-to-end tests"
$CARGO test --release --locked --package godwit-lab -- --test-threads=1
echo "== all tests passed"
