# Functions shared by scripts that use the lab. Sourced, not run.
# shellcheck shell=bash

# PROFILE=release selects the programs of `make build`.
BIN=${CARGO_TARGET_DIR:-target}/${PROFILE:-debug}
GODWIT=$BIN/godwit
LAB=$BIN/godwit-lab
BOOT_LIMIT_S=180
# Hosts file of the lab, whatever other hosts this machine knows.
export GODWIT_HOSTS=/run/godwit-lab/hosts.toml

say() { printf '\n== %s\n' "$*"; }
fail() { echo "$(basename "$0"): $*" >&2; exit 1; }

# Checks the requirements of every lab and finds the guest's image.
check_lab() {
  [ "$(id -u)" = 0 ] || fail "the lab makes network namespaces: run it as root"
  [ -x "$GODWIT" ] && [ -x "$LAB" ] && [ -x "$BIN/examples/guest_image" ] ||
    fail "not built yet: run \`make programs\`"
  local images
  images=$("$BIN/examples/guest_image")
  KERNEL=$(sed -n 's/^kernel //p' <<<"$images")
  INITRD=$(sed -n 's/^initrd //p' <<<"$images")
  APPEND=$(sed -n 's/^append //p' <<<"$images")
}

# at_end COMMAND: runs a command at the end of the script, after the lab is down.
at_end() { AT_END=$1; }
AT_END=:

# lab_up OPTIONS…: starts a new lab. It is taken down at the end of the script, whatever the cause,
# and the exit code is kept.
lab_up() {
  trap 'code=$?; trap - EXIT; say "lab down"; $LAB down || code=1; eval "$AT_END"; exit $code' EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  $LAB down >/dev/null
  $LAB up "$@"
}

# create_guest NAME LAST_NUMBER MEMORY GUEST_OPTIONS: creates the lab's guest at
# 10.88.0.LAST_NUMBER on host a, starts it and waits until its memory is filled.
create_guest() {
  local name=$1 number=$2 memory=$3 options=$4
  $GODWIT vm create "$name" --host a --memory "$memory" --start \
    --kernel "$KERNEL" --initrd "$INITRD" --nic "network=lan,address=10.88.0.$number" \
    --append "$APPEND godwit.ip=10.88.0.$number/24 godwit.ip6=fd88::$number/64 $options"
  local deadline=$((SECONDS + BOOT_LIMIT_S))
  until $LAB --json guest "$name" status 2>/dev/null | grep -E '"ready": *true' >/dev/null; do
    if [ $SECONDS -ge $deadline ]; then
      $GODWIT vm logs "$name" || true
      fail "the guest was not ready within $BOOT_LIMIT_S s; its console is above"
    fi
    # No event announces that a guest is ready.
    sleep 0.2
  done
}
