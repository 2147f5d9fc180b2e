#!/bin/sh
# Has schemathesis ask a manager with simulated hosts everything that its OpenAPI document describes, and check each answer against it.
# EXAMPLES=N requests of each operation (20), SEED=N repeats a run, PROFILE=release takes the programs of a release build. Its program is installed
# below out/tools the first time.
set -eu
cd "$(dirname "$0")/.."
bin="${CARGO_TARGET_DIR:-target}/${PROFILE:-debug}"
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
[authority]
certificate = "$dir/pki/ca.pem"
key = "$dir/pki/ca.key"
TOML
"$bin/godwit" pki init --dir "$dir/pki" > /dev/null
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

tries=0
until ask 'http://localhost/api/v1/vms?limit=1' | grep -q '"total":200'; do
  tries=$((tries + 1))
  [ "$tries" -lt 300 ] || { echo "the manager does not know the VMs of its hosts"; cat "$dir/log"; exit 1; }
  sleep 0.1
done

# What is there is asked for beside what is invented.
names() { ask "http://localhost/api/v1/$1?limit=50" | grep -o '"name":"[^"]*","'"$2"'":' | cut -d '"' -f 4 | sed 's/.*/"&",/' | tr -d '\n'; }
made() { ask -d "$2" "http://localhost/api/v1/$1" | grep -o '"id":"[^"]*"' | head -n 1 | cut -d '"' -f 4 | sed 's/.*/"&",/'; }
ids=
for n in 1 2 3; do
  ids="$ids$(made tokens '{"name":"other","role":"viewer"}')$(made join-tokens '{"host":"new"}')"
  ids="$ids$(made "vms/vm-0000$n/moves" '{}')$(made "hosts/host-000$n/drain" '{"plan_only":true}')"
done
cat > "$dir/schemathesis.toml" <<TOML
max-stream-events = 3
[dictionaries]
vms.values = [$(names vms host)]
ids.values = [$ids]
hosts.values = [$(names hosts address)]
agents.values = ["http://127.0.0.1:1", "http://127.0.0.1:2", "http://10.0.0.1:7700"]
[parameters]
"path.vm" = { dictionary = "vms", probability = 0.8 }
"path.host" = { dictionary = "hosts", probability = 0.8 }
"path.id" = { dictionary = "ids", probability = 0.5 }
"query.to" = { dictionary = "hosts", probability = 0.7 }
"body.to" = { dictionary = "hosts", probability = 0.7 }
"body.address" = { dictionary = "agents", probability = 0.7 }
[checks]
# 502 is told where a host does not answer, and the run names addresses for hosts at which nobody does.
not_a_server_error.expected-statuses = ["2XX", "3XX", "4XX", "502"]
# 422 is told of what is there, not of the request alone: a key that was used, a VM that no host takes.
positive_data_acceptance.expected-statuses = ["2XX", "401", "403", "404", "409", "422", "429", "5XX"]
[[operations]]
include-path = "/api/v1/join"
# What a certificate signing request is no schema can say: one that is none is told 400.
checks.positive_data_acceptance.expected-statuses = ["2XX", "400", "401", "403", "404", "409", "422", "429", "5XX"]
[[operations]]
include-path-regex = "^/api/v1/(rules|vms)$"
include-method = "POST"
# Neither what a rule asks of its fields together nor a VM's specification is in the schema: what is wrong with them is told 400.
checks.positive_data_acceptance.expected-statuses = ["2XX", "400", "401", "403", "404", "409", "422", "429", "5XX"]
[[operations]]
include-path = "/api/v1/vms/{vm}/console"
# It is a WebSocket: what asks for none is told 400.
checks.positive_data_acceptance.expected-statuses = ["2XX", "400", "401", "403", "404", "409", "422", "429", "5XX"]
[[operations]]
include-path = "/api/v1/cpu-baseline"
include-method = "PUT"
# Which names mean something hosts say: others are told 400.
checks.positive_data_acceptance.expected-statuses = ["2XX", "400", "401", "403", "404", "409", "422", "429", "5XX"]
TOML
tool=$PWD/$tool
cd "$dir"
"$tool/bin/schemathesis" run "http://127.0.0.1:$port/api/openapi.json" --header "Authorization: Bearer $token" \
  --checks all --max-examples "${EXAMPLES:-20}" --no-color --continue-on-failure \
  --rate-limit 150/s --request-timeout 10 ${SEED:+--seed "$SEED"}
# A run that revoked its own token has been told 401 from there on.
curl --silent --fail --header "Authorization: Bearer $token" "http://127.0.0.1:$port/api/v1/cluster" > /dev/null ||
  { echo "the run has revoked its own token: take another SEED"; exit 1; }
kill -0 "$manager"
