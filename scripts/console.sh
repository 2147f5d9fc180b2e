#!/usr/bin/env bash
# The console's built files, web/dist, are part of the repository, so that the manager is built without Node. Are they what the sources in web/
# make? Builds them elsewhere and compares; where Node is not installed it says so and ends with 0.
#   scripts/console.sh          compares
#   scripts/console.sh --write  builds web/dist anew
set -euo pipefail
cd "$(dirname "$0")/../web"

[ -f package.json ] || { echo "console: there are no sources yet"; exit 0; }
if ! command -v npm > /dev/null; then
  echo "skipped: npm is not installed, so whether web/dist is what web/ makes is not known"
  exit 0
fi
npm ci --no-audit --no-fund --loglevel=error
if [ "${1:-}" = --write ]; then
  npm run --silent build
  exit 0
fi

# A build writes web/dist itself: what is committed is kept aside meanwhile, and comes back.
kept=$(mktemp -d)
cp -a dist "$kept/committed"
back() { rm -rf dist && mv "$kept/committed" dist && rm -rf "$kept"; }
trap back EXIT
npm run --silent build > /dev/null
# The compressed forms are another version of Node's to make differently: what they hold counts.
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
  echo "web/dist is not what the sources in web/ make: run scripts/console.sh --write and commit what it changes"
  exit 1
fi
echo "== web/dist is what its sources make"
