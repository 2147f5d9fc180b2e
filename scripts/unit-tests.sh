#!/usr/bin/env bash
# Builds the unit and property tests of the workspace and runs two test programs at a time, because
# a program waits much of its time. Prints the output of each when it ends. Exits non-zero if one
# fails.
set -euo pipefail
cd "$(dirname "$0")/.."
CARGO=${CARGO:-cargo}
AT_ONCE=2

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
  # One write each, so that the outputs of two programs do not mix.
  { cat "$output"; echo "== $(basename "$program"): $verdict, $((SECONDS - began)) s"; } |
    flock "$0" cat
  exit $code
fi

# Always builds for the whole workspace: for a part of it cargo would rebuild the dependencies with
# other features.
$CARGO test --workspace --tests --locked --no-run --message-format=json-render-diagnostics |
  python3 -c '
import json, os, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("executable") and message["profile"]["test"]:
        print(message["executable"], os.path.dirname(message["manifest_path"]), sep="\0", end="\0")
' | xargs -0 -n 2 -P "$AT_ONCE" "$0" --one
