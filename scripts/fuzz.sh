#!/usr/bin/env bash
# Fuzzes the decoders: each target in turn, FUZZ_SECONDS in total, starting from the committed
# corpus. `fuzz.sh minimise` merges new inputs into the corpus, with as few files as give the same
# coverage. With findings, which are written to fuzz/artifacts, the script exits with an error.
set -euo pipefail
cd "$(dirname "$0")/../fuzz"
CARGO=${CARGO:-cargo}
CARGO_FUZZ_VERSION=0.13.2
SECONDS_IN_ALL=${FUZZ_SECONDS:-3600}
# The limits of one allocation, in MiB, are those of docs/fuzzing.md. The total limit includes the
# sanitizer's own memory.
RSS_LIMIT_MB=${FUZZ_RSS_LIMIT_MB:-2048}

tools=$PWD/../out/tools
export PATH="$tools/bin:$PATH"
command -v cargo-fuzz >/dev/null ||
  "$CARGO" install --locked --quiet --root "$tools" --version "$CARGO_FUZZ_VERSION" cargo-fuzz
# Sanitizers are unstable: nightly supports them, and so does the stable compiler with
# RUSTC_BOOTSTRAP.
if ! "$CARGO" --version | grep -q nightly; then export RUSTC_BOOTSTRAP=1; fi

rows() {
  awk -F'|' '/^\| `/ { gsub(/[` ]/, "", $2); gsub(/ /, "", $5); print $2, $5 }' ../docs/fuzzing.md
}
targets=${FUZZ_TARGETS:-$(rows | cut -d' ' -f1)}
limit_of() { rows | awk -v target="$1" '$1 == target { print $2 }'; }
# Artifacts stay beside the targets: they are built with other flags than all else.
fuzz() { local command=$1 && shift && "$CARGO" fuzz "$command" --target-dir target "$@"; }

# Folder of new inputs, beside the committed corpus.
found() { echo "target/found/$1"; }

if [ "${1:-}" = minimise ]; then
  for target in $targets; do
    mkdir -p "$(found "$target")" "target/least/$target"
    find "target/least/$target" -type f -delete
    fuzz run --features libfuzzer "$target" -- \
      -merge=1 "target/least/$target" "corpus/$target" "$(found "$target")"
    find "corpus/$target" -type f ! -name 'seed-*' -delete
    # Adds inputs of all sizes to the seeds, within the limits of the corpus.
    find "target/least/$target" -type f -size -16k -printf '%s %p\n' | sort -n |
      awk '{ line[NR] = $0 }
        END {
          step = NR > 150 ? NR / 150 : 1
          for (i = 1; i <= NR; i += step) print line[int(i)]
        }' |
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
    -max_total_time=$((SECONDS_IN_ALL / count)) -seed="${FUZZ_SEED:-1}" \
    -max_len="${FUZZ_MAX_LEN:-16384}" -timeout=10 -rss_limit_mb="$RSS_LIMIT_MB" \
    -malloc_limit_mb="$(limit_of "$target")" -print_final_stats=1 -verbosity=0
done
