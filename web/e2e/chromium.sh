# Read by the scripts here, not run.
# shellcheck shell=sh

# The distribution's Chromium; says why, and ends, where there is none and none can be installed.
find_chromium() {
  for name in ${GODWIT_CONSOLE_CHROMIUM:-} chromium chromium-browser google-chrome; do
    if command -v "$name" > /dev/null 2>&1; then
      GODWIT_CONSOLE_CHROMIUM=$(command -v "$name")
      export GODWIT_CONSOLE_CHROMIUM
      return
    fi
  done
  if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null && apt-get install -y chromium > /dev/null 2>&1; then
    find_chromium
    return
  fi
  echo "skipped: Chromium is not installed and can't be installed here (apt-get install chromium), so the console is not tried in a browser"
  exit 0
}
