#!/usr/bin/env bash
# Packages for Debian: godwit (the command), godwit-host (an agent's unit), godwit-control (a manager's). They land in out/deb.
# Expects `make build` before it; `make deb` does both.
#   DEB_REVISION=N scripts/deb.sh    a build of the same version that replaces those before it
set -euo pipefail
cd "$(dirname "$0")/.."
CARGO=${CARGO:-cargo}
CARGO_DEB_VERSION=3.8.0
TARGET=${CARGO_TARGET_DIR:-target}
OUT=out/deb

# The tool that makes packages is one of its own, kept in out/tools. Prints its path.
cargo_deb() {
  if command -v cargo-deb >/dev/null; then
    command -v cargo-deb
    return
  fi
  [ -x out/tools/bin/cargo-deb ] ||
    $CARGO install --locked --quiet --root out/tools --version "$CARGO_DEB_VERSION" cargo-deb >&2
  echo out/tools/bin/cargo-deb
}

mkdir -p "$OUT"
rm -f "$OUT"/*.deb
"$TARGET"/release/godwit completions bash >"$OUT"/godwit.bash
"$TARGET"/release/godwit completions zsh >"$OUT"/_godwit
"$TARGET"/release/godwit completions fish >"$OUT"/godwit.fish

tool=$(cargo_deb)
for variant in '' host control; do
  "$tool" deb --no-build --strip --locked --package godwit-cli ${variant:+--variant "$variant"} --output "$OUT" \
    --deb-revision "${DEB_REVISION:-1}"
done
ls -l "$OUT"/*.deb
