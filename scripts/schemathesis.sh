#!/bin/sh
# Has schemathesis ask a manager with simulated hosts everything that its OpenAPI document describes, and check each answer against it.
# EXAMPLES=N requests of each operation (20), SEED=N repeats a run. Its program is installed below out/tools the first time.
set -eu
cd "$(dirname "$0")/.."
bin="${CARGO_TARGET_DIR:-target}/release"
tool=out/tools/schemathesis
if [ ! -x "$tool/bin/schemathesis" ]; then
  python3 -m venv "$tool"
  "$tool/bin/pip" install --quiet 'schemathesis>=4.32,<5'
fi

dir=$(mktemp -d)
manager='' fleet=''
end() {
  # Closing its input ends the fleet.
  exec 9>&- || true
  [ -z "$manager" ] || kill "$manager" 2>/dev/null || true
  [ -z "$fleet" ] || wait "$fleet" 2>/dev/null || true
  rm -rf "$dir"
}
trap end EXIT INT TERM

port=${PORT:-17863}
cat > "$dir/control.toml" <<TOML
name = "schemathesis"
insecure = true
listen = ["127.0.0.1:$port"]
socket = "$dir/control.sock"
state_dir = "$dir/state"
TOML
mkfifo "$dir/input"
"$bin/godwit-fleet" --hosts 8 --vms 200 --speed 20 < "$dir/input" > "$dir/hosts" &
fleet=$!
exec 9> "$dir/input"
"$bin/godwit" control run --config "$dir/control.toml" 2> "$dir/log" &
manager=$!

ask() { curl --silent --show-error --fail --unix-socket "$dir/control.sock" -H 'content-type: application/json' "$@"; }
tries=0
until ask http://localhost/api/v1/cluster > /dev/null 2>&1; do
  tries=$((tries + 1))
  [ "$tries" -lt 300 ] || { cat "$dir/log"; exit 1; }
  sleep 0.1
done
while read -r host; do ask -d "$host" http://localhost/api/v1/hosts > /dev/null; done < "$dir/hosts"
token=$(ask -d '{"name":"schemathesis","role":"admin"}' http://localhost/api/v1/tokens | sed 's/.*"token":"\([^"]*\)".*/\1/')

# Left out: events have no end; positive_data_acceptance takes every VM and host that it invents to be there.
"$tool/bin/schemathesis" run "http://127.0.0.1:$port/api/openapi.json" --header "Authorization: Bearer $token" \
  --exclude-path /api/v1/events --checks all --exclude-checks positive_data_acceptance --max-examples "${EXAMPLES:-20}" \
  --rate-limit 150/s --request-timeout 10 ${SEED:+--seed "$SEED"}
kill -0 "$manager"
