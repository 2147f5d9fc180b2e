#!/usr/bin/env bash
# Runs all tests. Expects a previous `make programs`.
#   scripts/test.sh unit      unit and property tests
#   scripts/test.sh e2e       real QEMU guests in labs
#   scripts/test.sh console   the console in a browser
# Without an argument: all three. All run the development build.
set -euo pipefail
cd "$(dirname "$0")/.."
CARGO=${CARGO:-cargo}
END_TO_END=(--test end_to_end --test lab --test guest)
export PROFILE=debug

unit() { scripts/unit-tests.sh; }

# Two labs at a time: a lab waits for its guest much of the time. Always tests the whole workspace:
# for a part of it cargo would rebuild the dependencies with other features.
e2e() {
  GODWIT_TRIALS_AT_ONCE=2 $CARGO test --workspace --locked --no-fail-fast "${END_TO_END[@]}" \
    -- --test-threads=2
}

console() {
  if ! command -v npm >/dev/null; then
    echo "skipped: cannot test the console in a browser: npm is not installed (apt-get install npm)"
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
