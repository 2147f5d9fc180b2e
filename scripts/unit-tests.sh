#!/usr/bin/env bash
# Builds the unit and property tests of the workspace and runs two test programs at a time, because
# some of them wait for most of their time. Prints the output of each when it ends. Runs all of
# them, and exits non-zero if one fails.
set -euo pipefail
cd "$(dirname "$0")/.."
CARGO=${CARGO:-cargo}
AT_ONCE=2
SELF=$PWD/scripts/unit-tests.sh

# Runs one test program where cargo would run it: in the folder of its package.
if [ "${1:-}" = --one ]; then
  program=$2 package=$3 output=$(mktemp)
  trap 'rm -f "$output"' EXIT
  began=$SECONDS
  if (cd "$package" && "$program") >"$output" 2>&1; then
    verdict=passed code=0
  else
    verdict=FAILED code=1
  fi
  # Under a lock, so that the outputs of two programs do not mix.
  { cat "$output"; echo "== $(basename "$program"): $verdict, $((SECONDS - began)) s"; } |
    flock "$SELF" cat
  exit $code
fi

# Prints the path of each test program and of its package's folder, a line each, from cargo's
# messages.
programs() {
  local package='"manifest_path":"([^"]+)/Cargo.toml"'
  local profile='"profile":\{[^}]*"test":true[^}]*\}'
  local program='"executable":"([^"]+)"'
  sed -nE "s|.*$package.*$profile.*$program.*|\2\n\1|p"
}

# Always builds for the whole workspace: for a part of it cargo would rebuild the dependencies with
# other features.
$CARGO test --workspace --tests --locked --no-run --message-format=json-render-diagnostics |
  programs | xargs --no-run-if-empty -d '\n' -n 2 -P "$AT_ONCE" "$SELF" --one
