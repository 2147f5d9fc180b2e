#!/usr/bin/env bash
# Fuzzes the decoders: each target in turn, FUZZ_SECONDS in all, begun from the committed corpus. `fuzz.sh minimise` takes what was found
# into the corpus, as few files as cover the same. Findings end it non-zero and lie in fuzz/artifacts.
set -euo pipefail
cd "$(dirname "$0")/../fuzz"
CARGO=${CARGO:-cargo}
CARGO_FUZZ_VERSION=0.13.2
SECONDS_IN_ALL=${FUZZ_SECONDS:-3600}
# Limits for one allocation, in MiB, are those of docs/fuzzing.md; the sanitizer's own memory comes on top of the whole.
RSS_LIMIT_MB=${FUZZ_RSS_LIMIT_MB:-2048}

tools=$PWD/../out/tools
export PATH="$tools/bin:$PATH"
command -v cargo-fuzz >/dev/null ||
  "$CARGO" install --locked --quiet --root "$tools" --version "$CARGO_FUZZ_VERSION" cargo-fuzz
# Sanitizers are unstable: nightly has them, and the stable compiler too if it is told to.
if ! "$CARGO" --version | grep -q nightly; then export RUSTC_BOOTSTRAP=1; fi

rows() { awk -F'|' '/^\| `/ { gsub(/[` ]/, "", $2); gsub(/ /, "", $5); print $2, $5 }' ../docs/fuzzing.md; }
targets=${FUZZ_TARGETS:-$(rows | cut -d' ' -f1)}
limit_of() { rows | awk -v target="$1" '$1 == target { print $2 }'; }
fuzz() { "$CARGO" fuzz "$@"; }

# What is found goes to a folder beside the committed corpus.
found() { echo "target/found/$1"; }

if [ "${1:-}" = minimise ]; then
  for target in $targets; do
    mkdir -p "$(found "$target")" "target/least/$target"
    find "target/least/$target" -type f -delete
    fuzz run --features libfuzzer "$target" -- -merge=1 "target/least/$target" "corpus/$target" "$(found "$target")"
    find "corpus/$target" -type f ! -name 'seed-*' -delete
    # So many of them, small and large, beside the seeds, within the corpus' bounds.
    find "target/least/$target" -type f -size -16k -printf '%s %p\n' | sort -n |
      awk '{ line[NR] = $0 } END { step = NR > 150 ? NR / 150 : 1; for (i = 1; i <= NR; i += step) print line[int(i)] }' |
      awk '(bytes += $1) < 250000 { print $2 }' | xargs -r cp -t "corpus/$target"
  done
  exit
fi

fuzz build --features libfuzzer
count=$(wc -w <<<"$targets")
for target in $targets; do
  mkdir -p "$(found "$target")"
  printf '\n== fuzz: %s\n' "$target"
  fuzz run --features libfuzzer "$target" "$(found "$target")" "corpus/$target" -- \
    -max_total_time=$((SECONDS_IN_ALL / count)) -seed="${FUZZ_SEED:-1}" -max_len="${FUZZ_MAX_LEN:-16384}" -timeout=10 \
    -rss_limit_mb="$RSS_LIMIT_MB" -malloc_limit_mb="$(limit_of "$target")" -print_final_stats=1 -verbosity=0
done
