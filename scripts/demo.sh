#!/usr/bin/env bash
# Moves a running guest from one host to the other while it dirties memory and a client talks to it, then empties that host: all of it by
# the manager.
# Expects `make programs` before it. `make demo` does both.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/lab.sh
. scripts/lab.sh

VM=demo
WORKLOAD=dirty:rate=5000,ws=256M,order=random,zero=10,compressible=40

check_lab
say "lab up: two hosts, a and b, and a client, each a network namespace, and a manager that knows both hosts"
lab_up --hosts 2
$GODWIT control status
$GODWIT control host list

say "create a guest of 1 GiB on host a; it fills 512 MiB and dirties 5,000 pages a second"
create_guest $VM 21 1GiB "godwit.fill=512M godwit.workload=$WORKLOAD"
$GODWIT vm list

# The console of this very lab, for as long as somebody looks at it.
finish_demo() {
  local console token
  console=$($LAB status | sed -n 's/^ *manager .* console //p')
  token=$($GODWIT --json control token create demo --role admin | sed -n 's/.*"token": *"\([^"]*\)".*/\1/p')
  say "the console: $console"
  echo "token: $token"
  echo "The lab's own authority has signed its certificate; a browser asks once whether to go on."
  if [ -t 0 ] && [ -t 1 ]; then
    $GODWIT control host maintenance b off
    read -r -p "Look around, move the guest from there; Enter takes the lab down. "
  fi
}

verify() {
  say "the guest checks every page of its memory while it goes on dirtying it"
  $LAB guest $VM verify
}

say "the manager moves it to host b, the guest running, a client probing it a thousand times a second"
seen=$(mktemp)
$GODWIT watch 10.88.0.21 --min-gap 5ms >"$seen" 2>&1 &
watching=$!
$GODWIT control move create $VM --to b
kill -INT $watching
wait $watching || true
say "what the client saw, which sends a packet each millisecond"
echo "gaps of more than 5 ms: $(grep -c '^gap of' "$seen" || true) (a busy machine has such by itself); in all:"
grep -v -e '^gap of' -e '^answering' "$seen"
rm "$seen"
verify

say "empty host b: the manager says who would go where"
$GODWIT host drain b --plan
say "and does it"
$GODWIT host drain b
verify

finish_demo

say "delete the guest"
$GODWIT vm delete $VM --force
say "done: the guest moved twice while it ran, and no page of it is wrong"
$GODWIT control move list --all
