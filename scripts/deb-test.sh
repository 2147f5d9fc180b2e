#!/usr/bin/env bash
# Installs the packages on a clean Debian 12 that it makes itself (debootstrap) and boots
# (systemd-nspawn), without a network. Checks that the units start, a VM boots, an upgrade to
# another build keeps it running, a removal is refused while it runs, and `purge` leaves nothing.
# Expects a previous `make build`; `make deb-test` does both. The root is kept in out/deb-root for
# the next run.
set -euo pipefail
cd "$(dirname "$0")/.."

ROOT=out/deb-root
WORK=out/deb-test
MACHINE=godwit-deb-$$
PAUSE=0.2

say() { printf '== deb-test: %s\n' "$*"; }
fail() { printf 'deb-test: %s\n' "$*" >&2; exit 1; }

skip() {
  say "skipped: $*"
  exit 0
}

[ "$(id -u)" = 0 ] || skip "making and booting a Debian root needs root"
for package in debootstrap systemd-container; do
  dpkg -s "$package" >/dev/null 2>&1 ||
    apt-get install -y --no-install-recommends "$package" >/dev/null ||
    skip "cannot install $package"
done

if [ ! -e "$ROOT/made" ]; then
  say "making a clean Debian 12 with the packages' dependencies"
  rm -rf "$ROOT"
  mkdir -p "$ROOT"
  debootstrap --variant=minbase \
    --include=systemd,systemd-sysv,dbus,udev,ca-certificates,adduser bookworm "$ROOT/root" \
    >"$ROOT/log" 2>&1 || skip "debootstrap has no mirror: $(tail -n 1 "$ROOT/log")"
  chroot "$ROOT/root" apt-get install -y --no-install-recommends qemu-system-x86 \
    >>"$ROOT/log" 2>&1
  touch "$ROOT/made"
fi

rm -rf "$WORK"
mkdir -p "$WORK"
cp -a "$ROOT/root" "$WORK/root"
mkdir -p "$WORK/root/srv/guest" "$WORK/root/root/"{1,2}
install -m 644 out/guest/vmlinuz out/guest/initrd.img "$WORK/root/srv/guest/"
for revision in 1 2; do
  DEB_REVISION=$revision scripts/deb.sh >/dev/null
  cp out/deb/*.deb "$WORK/root/root/$revision/"
done

leader=
# Ends the machine that was booted here, and no other.
end() {
  [ -z "$leader" ] || kill -s RTMIN+4 "$leader" 2>/dev/null || true
  [ -z "$booted" ] || timeout 30 tail --pid="$booted" -f /dev/null ||
    kill -KILL "$booted" 2>/dev/null || true
}
booted=
trap end EXIT

say "booting it without a network"
# Tracking opens /dev/userfaultfd. A machine without controllers of cgroup v2 has those of v1.
unified=0
grep -qw cpu /sys/fs/cgroup/cgroup.controllers 2>/dev/null && unified=1
bind=()
for device in /dev/userfaultfd /dev/kvm; do [ -e $device ] && bind+=("--bind=$device"); done
SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=$unified systemd-nspawn --directory="$WORK/root" --boot \
  --private-network --register=no --keep-unit --machine="$MACHINE" "${bind[@]}" \
  </dev/null >"$WORK/boot.log" 2>&1 &
booted=$!

# inside COMMAND...: runs a command in the machine.
inside() { nsenter --target "$leader" --mount --uts --ipc --net --pid -- "$@"; }

# await WHAT SECONDS COMMAND...: waits until the command succeeds.
await() {
  local what=$1 left=$(($2 * 5))
  shift 2
  until "$@" >/dev/null 2>&1; do
    kill -0 "$booted" 2>/dev/null || fail "the machine ended: $(tail -n 3 "$WORK/boot.log")"
    left=$((left - 1))
    [ $left -gt 0 ] || fail "timeout: $what"
    sleep $PAUSE
  done
}

find_leader() { leader=$(pgrep -P "$booted" -f 'systemd$' | head -n 1) && [ -n "$leader" ]; }
is_up() { inside systemctl is-system-running | grep -qE 'running|degraded'; }
await "the machine's first process" 30 find_leader
await "the machine is up" 60 is_up

packages() {
  local install='DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends'
  inside sh -c "$install /root/$1/*.deb" >"$WORK/apt-$1.log" 2>&1
}
runs() { inside systemctl is-active --quiet "$1"; }
main_pid() { inside systemctl show -P MainPID "$1"; }

say "installing the packages; the units start"
packages 1 || fail "apt-get: $(tail -n 3 "$WORK/apt-1.log")"
await "godwit-host runs" 20 runs godwit-host
await "godwit-control runs" 20 runs godwit-control
await "godwit-watchdog runs" 20 runs godwit-watchdog
await "the manager answers" 20 inside godwit control status
await "the agent answers" 20 inside godwit host show
[ "$(inside stat -c %U "/proc/$(main_pid godwit-control)")" = godwit ] ||
  fail "the manager does not run as its own user"
inside systemctl show -P NRestarts godwit-host godwit-watchdog godwit-control |
  grep -vqE '^(0|)$' &&
  fail "a unit was restarted"

say "a VM boots"
inside godwit vm create web --start --memory 256MiB --accel tcg \
  --kernel /srv/guest/vmlinuz --initrd /srv/guest/initrd.img \
  --append "console=ttyS0 net.ifnames=0" >"$WORK/vm.log" 2>&1 || fail "$(cat "$WORK/vm.log")"
has_booted() { inside godwit vm logs web | grep -qi 'linux version'; }
await "output of the guest's kernel" 120 has_booted
# Prints the QEMU's process ID and its start time.
hypervisor() {
  inside sh -c 'for p in /proc/[0-9]*; do
    tr "\\0" " " <$p/cmdline | grep -q "gues[t]=web" && cut -d" " -f1,22 $p/stat
  done; true' 2>/dev/null
}
before=$(hypervisor)
agent=$(main_pid godwit-host)
watchdog=$(main_pid godwit-watchdog)
[ -n "$before" ] || fail "no QEMU runs"
groups=/sys/fs/cgroup/system.slice/godwit-vms.service
if inside grep -qw memory $groups/cgroup.controllers 2>/dev/null; then
  inside grep -qE '^[0-9]+$' $groups/vm.web/memory.max || fail "the VM has no memory limit"
  inside test -s $groups/vm.web/cgroup.procs || fail "its QEMU is in another cgroup"
else
  say "skipped: memory limits (no controller of cgroup v2)"
fi

say "an upgrade replaces the agent and keeps the VM's QEMU"
packages 2 || fail "apt-get: $(tail -n 3 "$WORK/apt-2.log")"
await "godwit-host runs" 20 runs godwit-host
is_another() { [ "$(main_pid godwit-host)" != "$agent" ]; }
await "a new agent" 20 is_another
is_running() { inside godwit --json vm show web | grep -q '"state": *"running"'; }
await "the VM runs" 20 is_running
[ "$(hypervisor)" = "$before" ] || fail "the VM's QEMU was replaced"
[ "$(main_pid godwit-watchdog)" = "$watchdog" ] || fail "the watchdog was restarted"
inside dpkg-query -W -f '${Package} ${Version}\n' 'godwit*' | grep -q -- '-2$' ||
  fail "nothing was upgraded"

say "a removal is refused while it runs, and leaves nothing afterwards"
inside apt-get remove -y godwit-host >"$WORK/remove.log" 2>&1 &&
  fail "godwit-host was removed under a running VM"
grep -q 'VMs run here: web' "$WORK/remove.log" || fail "$(tail -n 3 "$WORK/remove.log")"
await "the VM is deleted" 30 inside godwit vm delete web --force
inside apt-get purge -y godwit-host godwit-control godwit >"$WORK/purge.log" 2>&1 ||
  fail "$(tail -n 3 "$WORK/purge.log")"
for left in /etc/godwit /var/lib/godwit /var/lib/godwit-control /usr/lib/godwit /usr/bin/godwit; do
  inside test ! -e "$left" || fail "$left still exists"
done
say "passed"
