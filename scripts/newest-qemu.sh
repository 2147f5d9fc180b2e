#!/usr/bin/env bash
# Unpacks the newest QEMU that Debian's backports hold into out/qemu-newest, beside the installed
# one, and prints the directory of its programs. Nothing is installed and apt's lists stay as they are. A
# second run uses what is there; QEMU_RENEW=1 looks for a newer one.
#   PATH=$(scripts/newest-qemu.sh):$PATH make e2e
set -euo pipefail
cd "$(dirname "$0")/.."
TO=$PWD/out/qemu-newest
PROGRAMS=$TO/usr/bin

fail() { echo "newest-qemu: $*" >&2; exit 1; }

# Runs an apt command with lists and a cache of its own.
private() {
  local command=$1
  shift
  "$command" -o Dir::Etc::SourceList="$APT/sources.list" -o Dir::Etc::SourceParts=/dev/null \
    -o Dir::State::Lists="$APT/lists" -o Dir::Cache="$APT/cache" "$@" >&2
}

unpack() {
  # shellcheck disable=SC1091
  . /etc/os-release
  [ "${ID:-}" = debian ] || fail "cannot use backports: this is ${ID:-unknown}, and not Debian"
  local key=/usr/share/keyrings/debian-archive-keyring.gpg suite=$VERSION_CODENAME
  local archive
  archive=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' "Release: $suite" |
    head -n 1)
  [ -n "$archive" ] || fail "cannot find the archive of $suite: run apt-get update, then try again"
  APT=$(mktemp -d)
  trap 'rm -rf "$APT"' EXIT
  # apt reads packages as a user of its own.
  chmod 755 "$APT"
  mkdir -p "$APT/lists/partial" "$APT/cache/archives/partial"
  for name in "$suite" "$suite-backports"; do
    echo "deb [signed-by=$key] $archive $name main"
  done > "$APT/sources.list"
  private apt-get -q update
  # Only what the installed packages do not satisfy is fetched.
  private apt-get -q -y --no-install-recommends --download-only -t "$suite-backports" \
    install qemu-system-x86
  rm -rf "$TO.new"
  mkdir -p "$TO.new"
  for package in "$APT"/cache/archives/*.deb; do dpkg -x "$package" "$TO.new"; done
  [ -x "$TO.new/usr/bin/qemu-system-x86_64" ] ||
    fail "cannot unpack a newer QEMU: the installed one is the newest of $suite-backports"
  rm -rf "$TO"
  mv "$TO.new" "$TO"
}

if [ -n "${QEMU_RENEW:-}" ] || [ ! -x "$PROGRAMS/qemu-system-x86_64" ]; then unpack; fi
"$PROGRAMS/qemu-system-x86_64" --version >&2 ||
  fail "cannot run the unpacked QEMU: a library that it needs is not installed"
echo "$PROGRAMS"
