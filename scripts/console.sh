#!/usr/bin/env bash
# Checks that web/dist is up to date. The repository contains these built files, so that the manager
# is built without Node. Builds the sources of web/ elsewhere and compares. Without Node the script
# says so and exits with 0.
#   scripts/console.sh          compares
#   scripts/console.sh --write  rebuilds web/dist
set -euo pipefail
cd "$(dirname "$0")/../web"

[ -f package.json ] || { echo "console: no sources"; exit 0; }
if ! command -v npm > /dev/null; then
  echo "skipped: cannot check web/dist: npm is not installed"
  exit 0
fi
npm ci --no-audit --no-fund --loglevel=error
if [ "${1:-}" = --write ]; then
  npm run --silent build
  exit 0
fi

# A build writes to web/dist itself, so the committed files are moved aside and restored afterwards.
kept=$(mktemp -d)
cp -a dist "$kept/committed"
back() { rm -rf dist && mv "$kept/committed" dist && rm -rf "$kept"; }
trap back EXIT
npm run --silent build > /dev/null
# Other versions of Node compress differently, so the uncompressed content is compared.
unpack() {
  find "$1" -name '*.gz' -exec sh -c 'gzip -dc "$0" > "$0.held" && rm "$0"' {} \;
  find "$1" -name '*.br' -exec node -e '
    const fs = require("fs"), zlib = require("zlib"), path = process.argv[1];
    fs.writeFileSync(path + ".held", zlib.brotliDecompressSync(fs.readFileSync(path)));
    fs.rmSync(path);' {} \;
}
cp -a dist "$kept/made" && cp -a "$kept/committed" "$kept/compared"
unpack "$kept/made"
unpack "$kept/compared"
if ! diff -rq "$kept/compared" "$kept/made"; then
  echo "web/dist is out of date; remedy: run scripts/console.sh --write and commit the changes"
  exit 1
fi
echo "== web/dist is up to date"
