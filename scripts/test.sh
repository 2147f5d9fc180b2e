#!/usr/bin/env bash
# Every test. Expects `make build` before it.
#   scripts/test.sh unit      unit and property tests, in the dev profile
#   scripts/test.sh e2e       real QEMU guests in labs, with the release build
#   scripts/test.sh console   the console in a browser
# Without an argument: all three.
set -euo pipefail
cd "$(dirname "$0")/.."
CARGO=${CARGO:-cargo}

unit() { $CARGO test --workspace --tests --locked --no-fail-fast; }

# Two labs at a time: a lab waits for its guest much of the time. The whole workspace is selected
# because cargo would build the dependencies again, with other features, for a part of it.
e2e() {
  GODWIT_TRIALS_AT_ONCE=2 $CARGO test --release --workspace --locked --no-fail-fast \
    --test end_to_end --test lab --test guest -- --test-threads=2
}

console() {
  if ! command -v npm >/dev/null; then
    echo "skipped: npm is not installed, so the console is not tested in a browser (apt-get install npm)"
    return
  fi
  (cd web && npm ci --no-audit --no-fund --loglevel=error &&
    npm run --silent check && npm run --silent test && e2e/run.sh && e2e/real.sh)
}

timed() {
  local began=$SECONDS
  "$1"
  echo "== $1: $((SECONDS - began)) s"
}

for part in ${@:-unit e2e console}; do timed "$part"; done
echo "== all tests passed"
