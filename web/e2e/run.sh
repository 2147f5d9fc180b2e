#!/bin/sh
# Uses the console in a browser as a person would, against a manager with simulated hosts. GODWIT_CONSOLE_FIGURES=DIR keeps pictures of it
# there; PROFILE=release takes the programs of a release build.
# With GODWIT_CONSOLE_URL and GODWIT_CONSOLE_TOKEN it is used against that manager instead, see docs/console.md.
set -eu
cd "$(dirname "$0")/.."
. e2e/lab.sh
find_chromium
if [ -z "${GODWIT_CONSOLE_URL:-}" ]; then
  start_lab 8 200 1
  export GODWIT_CONSOLE_URL="$url" GODWIT_CONSOLE_TOKEN="$token" GODWIT_CONSOLE_VIEWER_TOKEN="$viewer"
fi
node --test --test-reporter=spec e2e/console.test.mjs
