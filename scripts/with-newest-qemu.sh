#!/usr/bin/env bash
# Runs a command with the newest QEMU of Debian's backports in the place of the installed one:
#   scripts/with-newest-qemu.sh scripts/test.sh e2e
# The QEMU is unpacked into out/qemu-newest and mounted over the installed files, in a mount
# namespace of the command. Nothing is installed, and apt's lists stay as they are. A later run uses
# what is unpacked; QEMU_RENEW=1 looks for a newer one. Needs root.
set -euo pipefail
cd "$(dirname "$0")/.."
TO=$PWD/out/qemu-newest

fail() { echo "with-newest-qemu: $*" >&2; exit 1; }

# Runs apt-get with lists and a cache of its own.
apt_get() {
  apt-get -q -o Dir::Etc::SourceList="$APT/sources.list" -o Dir::Etc::SourceParts=/dev/null \
    -o Dir::State::Lists="$APT/lists" -o Dir::Cache="$APT/cache" "$@" >&2
}

unpack() (
  # shellcheck disable=SC1091
  . /etc/os-release
  [ "${ID:-}" = debian ] || fail "cannot use backports: this is ${ID:-unknown}, and not Debian"
  local key=/usr/share/keyrings/debian-archive-keyring.gpg suite=$VERSION_CODENAME archive
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
  apt_get update
  # virtio-vga is a module of its own since QEMU 10, in the package of OpenGL's.
  apt_get -y --no-install-recommends --download-only -t "$suite-backports" \
    install qemu-system-x86 qemu-system-modules-opengl
  rm -rf "$TO.new"
  mkdir -p "$TO.new"
  shopt -s nullglob
  for package in "$APT"/cache/archives/{qemu,seabios}*.deb; do dpkg -x "$package" "$TO.new"; done
  [ -x "$TO.new/usr/bin/qemu-system-x86_64" ] ||
    fail "cannot unpack a newer QEMU: the installed one is the newest of $suite-backports"
  # Firmware of other packages is in the directory that is mounted over.
  cp -an /usr/share/qemu/. "$TO.new/usr/share/qemu/"
  rm -rf "$TO"
  mv "$TO.new" "$TO"
)

# Mounts the unpacked files over the installed ones, in this process's mount namespace.
mount_over() {
  local modules program
  modules=usr/lib/$(uname -m)-linux-gnu/qemu
  for directory in usr/share/qemu usr/share/seabios "$modules"; do
    [ -d "/$directory" ] || fail "cannot replace /$directory: it is not installed"
    mount --bind "$TO/$directory" "/$directory"
  done
  for program in qemu-system-x86_64 qemu-img qemu-io; do
    mount --bind "$TO/usr/bin/$program" "/usr/bin/$program"
  done
  qemu-system-x86_64 --version >&2 || fail "cannot run the unpacked QEMU: it lacks a library"
}

if [ "${1:-}" = --mounted ]; then
  shift
  mount_over
  exec "$@"
fi
[ $# -gt 0 ] || fail "cannot run nothing: give a command"
if [ -n "${QEMU_RENEW:-}" ] || [ ! -d "$TO" ]; then unpack; fi
exec unshare --mount --propagation slave scripts/with-newest-qemu.sh --mounted "$@"
