#!/usr/bin/env bash
# Moves a running guest from one host to the other while it dirties memory and a client talks to it,
# then drains that host, all through the manager. Expects a previous `make programs`; `make demo`
# does both.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/lab.sh
. scripts/lab.sh

VM=demo
WORKLOAD=dirty:rate=5000,ws=256M,order=random,zero=10,compressible=40

check_lab
say "lab up: hosts a and b and a client, each a network namespace, and a manager of both hosts"
lab_up --hosts 2
$GODWIT control status
$GODWIT control host list

say "create a guest of 1 GiB on host a; it fills 512 MiB and dirties 5,000 pages a second"
create_guest $VM 21 1GiB "godwit.fill=512M godwit.workload=$WORKLOAD"
$GODWIT vm list

# Prints how to open this lab's console, and waits while somebody uses it.
finish_demo() {
  local console token
  console=$($LAB status | sed -n 's/^ *manager .* console //p')
  token=$($GODWIT --json control token create demo --role admin |
    sed -n 's/.*"token": *"\([^"]*\)".*/\1/p')
  say "the console: $console"
  echo "token: $token"
  echo "Its certificate is signed by the lab's own authority; the browser asks for confirmation."
  if [ -t 0 ] && [ -t 1 ]; then
    $GODWIT control host maintenance b off
    read -r -p "Try the console and move the guest; press Enter to take the lab down. "
  fi
}

verify() {
  say "the guest checks every page of its memory while its workload continues"
  $LAB guest $VM verify
}

say "the manager moves the running guest to host b; a client probes it 1,000 times a second"
seen=$(mktemp)
$GODWIT watch 10.88.0.21 --min-gap 5ms >"$seen" 2>&1 &
watching=$!
$GODWIT control move create $VM --to b
kill -INT $watching
wait $watching || true
say "what the client saw; it sends a packet each millisecond"
gaps=$(grep -c '^gap of' "$seen" || true)
echo "gaps of more than 5 ms: $gaps (a busy machine also causes such gaps); in total:"
grep -v -e '^gap of' -e '^answering' "$seen"
rm "$seen"
verify

say "drain host b: the manager plans the moves"
$GODWIT host drain b --plan
say "and makes them"
$GODWIT host drain b
verify

finish_demo

say "delete the guest"
$GODWIT vm delete $VM --force
say "done: the guest moved twice while it ran, and all its pages are correct"
$GODWIT control move list --all
