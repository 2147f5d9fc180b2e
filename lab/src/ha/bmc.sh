#!/bin/sh
# Stands for `ipmitool` and for the BMCs of a lab's hosts. Beside it are, for each host: its mode
# (works, lies, fails), its network namespace, and a file that exists while the BMC says "off".
while [ $# -gt 0 ]; do
    case "$1" in
    -H) host=$2 && shift ;;
    off | status) what=$1 ;;
    esac
    shift
done
dir=$(dirname "$0")
mode=$(cat "$dir/$host.mode")
if [ "$mode" = fails ]; then
    echo "Error: Unable to establish IPMI v2 / RMCP+ session" >&2
    exit 1
fi
if [ "$what" = off ]; then
    if [ "$mode" = works ]; then
        for pid in $(ip netns pids "$(cat "$dir/$host.namespace")"); do
            kill -9 "$pid"
        done
    fi
    : >"$dir/$host.off"
    echo "Chassis Power Control: Down/Off"
elif [ -e "$dir/$host.off" ]; then
    echo "Chassis Power is off"
else
    echo "Chassis Power is on"
fi
