#!/usr/bin/env bash
# Builds the Debian packages in out/deb: godwit (the command), godwit-host (the agent's unit) and
# godwit-control (the manager's unit). Expects a previous `make build`; `make deb` does both.
#   DEB_REVISION=N scripts/deb.sh    a build of the same version that replaces earlier ones
set -euo pipefail
cd "$(dirname "$0")/.."
CARGO=${CARGO:-cargo}
CARGO_DEB_VERSION=3.8.0
TARGET=${CARGO_TARGET_DIR:-target}
OUT=out/deb

# Prints the path of cargo-deb. Installs it in out/tools if it is missing.
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
  "$tool" deb --no-build --strip --locked --package godwit-cli ${variant:+--variant "$variant"} \
    --output "$OUT" --deb-revision "${DEB_REVISION:-1}"
done
ls -l "$OUT"/*.deb
