#!/bin/sh
# Uses the console in a browser as a person would, against a manager with simulated hosts.
# GODWIT_CONSOLE_FIGURES=DIR keeps pictures there; PROFILE=release uses a release build.
# GODWIT_CONSOLE_URL and GODWIT_CONSOLE_TOKEN select another manager (docs/console.md).
set -eu
cd "$(dirname "$0")/.."
. e2e/lab.sh
find_chromium
simulated=
if [ -z "${GODWIT_CONSOLE_URL:-}" ]; then
  simulated=yes
  start_lab 8 80 1
  export GODWIT_CONSOLE_URL="$url" GODWIT_CONSOLE_TOKEN="$token"
  export GODWIT_CONSOLE_VIEWER_TOKEN="$viewer"
  # These need simulated hosts: images and disks do not exist, and guests of libvirt are made up.
  node --test --test-reporter=spec e2e/manage.test.mjs
  node --test --test-reporter=spec e2e/adopt.test.mjs
  node --test --test-reporter=spec e2e/watch.test.mjs
fi
node --test --test-reporter=spec e2e/console.test.mjs
if [ "$simulated" ]; then
  # Definitions are made up, too. The imported VM stays, stopped: a drain would leave it.
  node --test --test-reporter=spec e2e/import.test.mjs
fi
