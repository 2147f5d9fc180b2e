# A manager with simulated hosts, sourced by the scripts here. `start_lab HOSTS VMS SPEED` sets
# `url`,
# `token` (admin) and `viewer`; everything ends with the script.

# The caller's directory is web/.
root=$(cd .. && pwd)
bin=${GODWIT_BIN:-${CARGO_TARGET_DIR:-$root/target}/${PROFILE:-debug}}
lab='' manager='' fleet='' server=''

end_lab() {
  [ -z "$lab" ] && return
  # The fleet ends when its input is closed.
  exec 9>&- || true
  [ -z "$server" ] || kill "$server" 2>/dev/null || true
  [ -z "$manager" ] || kill "$manager" 2>/dev/null || true
  [ -z "$fleet" ] || wait "$fleet" 2>/dev/null || true
  rm -rf "$lab"
}

. "$root/web/e2e/chromium.sh"

ask() {
  curl --silent --show-error --fail --unix-socket "$lab/control.sock" \
    -H 'content-type: application/json' "$@"
}

# wait_for TENTHS WHAT COMMAND...: waits until the command succeeds.
wait_for() {
  left=$1 what=$2
  shift 2
  until "$@" > /dev/null 2>&1; do
    left=$((left - 1))
    [ "$left" -gt 0 ] || { echo "timeout: $what"; tail -n 20 "$lab/log"; exit 1; }
    sleep 0.1
  done
}

leads() { ask http://localhost/api/v1/cluster | grep -q '"is_self":true'; }
knows_all() { ask 'http://localhost/api/v1/vms?limit=1' | grep -q "\"total\":$1"; }
make_token() {
  ask -d "{\"name\":\"$1\",\"role\":\"$1\"}" http://localhost/api/v1/tokens |
    sed 's/.*"token":"\([^"]*\)".*/\1/'
}

start_lab() {
  [ -x "$bin/godwit" ] && [ -x "$bin/godwit-fleet" ] || {
    echo "cannot find godwit and godwit-fleet in $bin: run make programs"
    exit 1
  }
  lab=$(mktemp -d)
  trap end_lab EXIT INT TERM
  port=${PORT:-17864}
  cat > "$lab/control.toml" <<TOML
name = "m1"
insecure = true
listen = ["127.0.0.1:$port"]
socket = "$lab/control.sock"
state_dir = "$lab/state"
[authority]
certificate = "$lab/pki/ca.pem"
key = "$lab/pki/ca.key"
TOML
  "$bin/godwit" pki init --dir "$lab/pki" > /dev/null
  mkfifo "$lab/input"
  "$bin/godwit-fleet" --hosts "$1" --vms "$2" --speed "$3" --datastores \
    < "$lab/input" > "$lab/hosts" &
  fleet=$!
  exec 9> "$lab/input"
  "$bin/godwit" control run --config "$lab/control.toml" 2> "$lab/log" &
  manager=$!
  wait_for 600 "the manager" leads
  while read -r host; do
    ask -d "$host" http://localhost/api/v1/hosts > /dev/null
  done < "$lab/hosts"
  token=$(make_token admin) viewer=$(make_token viewer)
  wait_for 600 "all VMs" knows_all "$2"
  url=http://127.0.0.1:$port
  # A manager without this build's files gets a server with them in front.
  if ! curl --silent "$url/" | cmp -s - "$root/web/dist/index.html"; then
    node "$root/web/e2e/serve.mjs" $((port + 1)) "$url" &
    server=$!
    url=http://127.0.0.1:$((port + 1))
    wait_for 100 "the console's files" curl --silent --fail "$url/"
  fi
}
