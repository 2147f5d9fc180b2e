#!/bin/sh
# Runs schemathesis against a manager with simulated hosts: sends requests for everything in its
# OpenAPI document and checks each response against it. EXAMPLES=N sets the requests per operation
# (20), SEED=N repeats a run, PROFILE=release selects the programs of a release build. The tool is
# installed below out/tools on first use.
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
"$bin/godwit-fleet" --hosts 8 --vms 200 --speed 20 --datastores < "$dir/input" > "$dir/hosts" &
fleet=$!
exec 9> "$dir/input"
"$bin/godwit" control run --config "$dir/control.toml" 2> "$dir/log" &
manager=$!

ask() {
  curl --silent --show-error --fail --unix-socket "$dir/control.sock" \
    -H 'content-type: application/json' "$@"
}
tries=0
until ask http://localhost/api/v1/cluster > /dev/null 2>&1; do
  tries=$((tries + 1))
  [ "$tries" -lt 300 ] || { cat "$dir/log"; exit 1; }
  sleep 0.1
done
while read -r host; do ask -d "$host" http://localhost/api/v1/hosts > /dev/null; done < "$dir/hosts"
token=$(ask -d '{"name":"schemathesis","role":"admin"}' http://localhost/api/v1/tokens |
  sed 's/.*"token":"\([^"]*\)".*/\1/')

tries=0
until ask 'http://localhost/api/v1/vms?limit=1' | grep -q '"total":200'; do
  tries=$((tries + 1))
  if [ "$tries" -ge 300 ]; then
    echo "the manager does not report the VMs of its hosts"
    cat "$dir/log"
    exit 1
  fi
  sleep 0.1
done

# Requests use existing names beside invented ones.
names() {
  ask "http://localhost/api/v1/$1?limit=50" | grep -o '"name":"[^"]*","'"$2"'":' |
    cut -d '"' -f 4 | sed 's/.*/"&",/' | tr -d '\n'
}
made() {
  ask -d "$2" "http://localhost/api/v1/$1" | grep -o '"id":"[^"]*"' | head -n 1 |
    cut -d '"' -f 4 | sed 's/.*/"&",/'
}
ids=
for n in 1 2 3; do
  ids="$ids$(made tokens '{"name":"other","role":"viewer"}')"
  ids="$ids$(made join-tokens '{"host":"new"}')"
  ids="$ids$(made "vms/vm-0000$n/moves" '{}')$(made "hosts/host-000$n/drain" '{"plan_only":true}')"
done
without_400='["2XX", "401", "403", "404", "409", "422", "429", "5XX"]'
with_400='["2XX", "400", "401", "403", "404", "409", "422", "429", "5XX"]'
cat > "$dir/schemathesis.toml" <<TOML
max-stream-events = 3
[dictionaries]
vms.values = [$(names vms host)]
ids.values = [$ids]
datastores.values = ["00000001-0000-0000-0000-000000000000",
  "00000002-0000-0000-0000-000000000000"]
hosts.values = [$(names hosts address)]
agents.values = ["http://127.0.0.1:1", "http://127.0.0.1:2", "http://10.0.0.1:7700"]
[parameters]
"path.vm" = { dictionary = "vms", probability = 0.8 }
"path.datastore" = { dictionary = "datastores", probability = 0.6 }
"path.host" = { dictionary = "hosts", probability = 0.8 }
"path.id" = { dictionary = "ids", probability = 0.5 }
"query.to" = { dictionary = "hosts", probability = 0.7 }
"body.to" = { dictionary = "hosts", probability = 0.7 }
"body.address" = { dictionary = "agents", probability = 0.7 }
[checks]
# 502 means that a host does not answer, and the run uses addresses without a host.
not_a_server_error.expected-statuses = ["2XX", "3XX", "4XX", "502"]
# 422 depends on the state and not on the request only: a used key, a VM that no host accepts.
positive_data_acceptance.expected-statuses = $without_400
[[operations]]
include-path = "/api/v1/join"
# A schema cannot describe a certificate signing request. An invalid one gets 400.
checks.positive_data_acceptance.expected-statuses = $with_400
[[operations]]
include-path-regex = "^/api/v1/(rules|vms)$"
include-method = "POST"
# The schema describes neither the combinations of a rule's fields nor a VM's specification. Errors
# in them get 400.
checks.positive_data_acceptance.expected-statuses = $with_400
[[operations]]
include-path = "/api/v1/vms/{vm}"
include-method = "PATCH"
# As for a new VM.
checks.positive_data_acceptance.expected-statuses = $with_400
[[operations]]
include-path = "/api/v1/vms/{vm}/clone"
include-method = "POST"
# The schema describes neither the names of VMs nor how many NICs the source has.
checks.positive_data_acceptance.expected-statuses = $with_400
[[operations]]
include-path-regex = "^/api/v1/vms/[{]vm[}]/(console|screen)$"
# A WebSocket: other requests get 400.
checks.positive_data_acceptance.expected-statuses = $with_400
[[operations]]
include-path-regex = "^/api/v1/datastores/[{]datastore[}](/drain)?$"
# The schema describes neither names and tags nor rates. Errors in them get 400.
checks.positive_data_acceptance.expected-statuses = $with_400
[[operations]]
include-path = "/api/v1/load"
# The schema describes neither the names of objects nor that one time is before the other, and hosts
# are tried as \`to\`. Errors in them get 400.
checks.positive_data_acceptance.expected-statuses = $with_400
[[operations]]
include-path = "/api/v1/cpu-baseline"
include-method = "PUT"
# The valid names depend on the hosts. Others get 400.
checks.positive_data_acceptance.expected-statuses = $with_400
TOML
tool=$PWD/$tool
cd "$dir"
"$tool/bin/schemathesis" run "http://127.0.0.1:$port/api/openapi.json" \
  --header "Authorization: Bearer $token" --checks all --max-examples "${EXAMPLES:-20}" \
  --no-color --continue-on-failure \
  --rate-limit 150/s --request-timeout 10 ${SEED:+--seed "$SEED"}
# A run that revoked its own token got only 401 afterwards.
curl --silent --fail --header "Authorization: Bearer $token" \
  "http://127.0.0.1:$port/api/v1/cluster" > /dev/null ||
  { echo "the run revoked its own token; remedy: use another SEED"; exit 1; }
kill -0 "$manager"
