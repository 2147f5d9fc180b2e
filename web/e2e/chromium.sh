# Sourced by the scripts here.
# shellcheck shell=sh

# Finds the distribution's Chromium, or installs it. If that fails, the script ends with a message.
find_chromium() {
  for name in ${GODWIT_CONSOLE_CHROMIUM:-} chromium chromium-browser google-chrome; do
    if command -v "$name" > /dev/null 2>&1; then
      GODWIT_CONSOLE_CHROMIUM=$(command -v "$name")
      export GODWIT_CONSOLE_CHROMIUM
      return
    fi
  done
  if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null &&
    apt-get install -y chromium > /dev/null 2>&1; then
    find_chromium
    return
  fi
  echo "skipped: cannot find or install Chromium (apt-get install chromium);" \
    "the console is not tested in a browser"
  exit 0
}
