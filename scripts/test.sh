#!/usr/bin/env bash
# Runs all tests. Expects `make programs` before it.
#   scripts/test.sh unit      unit and property tests
#   scripts/test.sh e2e       real QEMU guests in labs
#   scripts/test.sh console   the console in a browser
# Without an argument: all three. All run the development build.
set -euo pipefail
cd "$(dirname "$0")/.."
CARGO=${CARGO:-cargo}
END_TO_END=(--test end_to_end --test lab --test guest)
export PROFILE=debug

# The workspace is always selected whole: for a part of it cargo would build the dependencies again,
# with other features.
unit() { $CARGO test --workspace --tests --locked --no-fail-fast; }

# Two labs at a time: a lab waits for its guest much of the time.
e2e() {
  GODWIT_TRIALS_AT_ONCE=2 $CARGO test --workspace --locked --no-fail-fast "${END_TO_END[@]}" -- --test-threads=2
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
