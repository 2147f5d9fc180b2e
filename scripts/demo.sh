#!/usr/bin/env bash
# Moves a running guest from one host to the other and back while it dirties memory and a client talks to it.
# Expects `make build` before it. `make demo` does both.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/lab.sh
. scripts/lab.sh

VM=demo
WORKLOAD=dirty:rate=5000,ws=256M,order=random,zero=10,compressible=40

check_lab
say "lab up: two hosts, a and b, and a client, each a network namespace"
lab_up --hosts 2
$GODWIT host list

say "create a guest of 1 GiB on host a; it fills 512 MiB and dirties 5,000 pages a second"
create_guest $VM 21 1GiB "godwit.fill=512M godwit.workload=$WORKLOAD"
$GODWIT vm list

for to in b a; do
  say "migrate to host $to, the guest running, a client probing it a thousand times a second"
  $GODWIT migrate $VM --to $to
  say "the guest checks every page of its memory while it goes on dirtying it"
  $GODWIT lab guest $VM verify
done

say "delete the guest"
$GODWIT vm delete $VM --force
say "done: the guest moved twice while it ran, and no page of it is wrong"
