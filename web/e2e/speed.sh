#!/bin/sh
# Measures the console's speed at 1,000 VMs with 20 running moves, and the growth of its memory.
# Prints JSON. MINUTES=30 is the time it is watched, SPEED=1 the speed of moves against real time;
# also VMS=1000, HOSTS=40, MOVES=20.
set -eu
cd "$(dirname "$0")/.."
. e2e/lab.sh
find_chromium
if [ -z "${GODWIT_CONSOLE_URL:-}" ]; then
  start_lab "${HOSTS:-40}" "${VMS:-1000}" "${SPEED:-1}"
  export GODWIT_CONSOLE_URL="$url" GODWIT_CONSOLE_TOKEN="$token"
fi
node e2e/speed.mjs
