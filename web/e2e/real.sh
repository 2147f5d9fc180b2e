#!/usr/bin/env bash
# Runs the test of run.sh against real agents and guests: a lab of two hosts and its manager, over
# TLS.
# Needs root, for the lab's network namespaces, and `make programs` before it.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=scripts/lab.sh
. scripts/lab.sh
. web/e2e/chromium.sh

if [ "$(id -u)" != 0 ] || ! unshare --net true 2>/dev/null; then
  echo "skipped: cannot create network namespaces (needs root);" \
    "the console is not tested with real guests"
  exit 0
fi
find_chromium
check_lab
say "starting the lab: two hosts, a manager and two guests of 512 MiB each"
# For the disks of the VM with snapshots: both hosts have it, as if it were shared.
images=$(mktemp -d /var/tmp/godwit-console.XXXXXX)
at_end 'rm -rf "$images"'
lab_up --hosts 2 --vm-dir "$images"
create_guest first 21 512MiB "godwit.fill=64M"
create_guest second 22 512MiB "godwit.fill=64M"

make_token() {
  $GODWIT --json control token create "$1" --role "$1" |
    sed -n 's/.*"token": *"\([^"]*\)".*/\1/p'
}
GODWIT_CONSOLE_URL=$($LAB status | sed -n 's/^ *manager .* console //p')
GODWIT_CONSOLE_TOKEN=$(make_token admin)
GODWIT_CONSOLE_VIEWER_TOKEN=$(make_token viewer)
GODWIT_CONSOLE_SPEC="{\"memory\":\"512MiB\",\"kernel\":\"$KERNEL\",\"initrd\":\"$INITRD\",\
\"cmdline\":\"$APPEND godwit.fill=64M godwit.workload=dirty:rate=2000,ws=32M\"}"
GODWIT_CONSOLE_DRAIN=a
GODWIT_CONSOLE_DISKS=yes
# The lab's own authority has issued the manager's certificate.
NODE_EXTRA_CA_CERTS=/run/godwit-lab/pki/ca.pem
[ -r $NODE_EXTRA_CA_CERTS ] || fail "cannot read the lab's authority: $NODE_EXTRA_CA_CERTS"
export GODWIT_CONSOLE_URL GODWIT_CONSOLE_TOKEN GODWIT_CONSOLE_VIEWER_TOKEN
export GODWIT_CONSOLE_SPEC GODWIT_CONSOLE_DRAIN GODWIT_CONSOLE_DISKS NODE_EXTRA_CA_CERTS
say "the console in a browser, with these guests"
(cd web && node --test --test-reporter=spec e2e/console.test.mjs)
