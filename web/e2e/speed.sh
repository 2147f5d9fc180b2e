#!/bin/sh
# How fast the console is at 1,000 VMs with 20 moves that run, and whether its memory grows: figures as JSON.
#   MINUTES=30 how long it is watched, VMS=1000, HOSTS=40, MOVES=20, SPEED=1 how much faster than real time moves are.
set -eu
cd "$(dirname "$0")/.."
. e2e/lab.sh
find_chromium
if [ -z "${GODWIT_CONSOLE_URL:-}" ]; then
  start_lab "${HOSTS:-40}" "${VMS:-1000}" "${SPEED:-1}"
  export GODWIT_CONSOLE_URL="$url" GODWIT_CONSOLE_TOKEN="$token"
fi
node e2e/speed.mjs
