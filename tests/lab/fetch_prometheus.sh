#!/bin/bash
# Usage: fetch_prometheus.sh DEST
#
# Unpacks Debian's prometheus and promtool into DEST.  Nothing is installed, and apt keeps what it
# learns in a private folder.  promtool is moved there last; if it is there, DEST is whole.
set -euo pipefail

instead="put prometheus and promtool on PATH instead"
. "$(dirname "$0")/unpacking.sh"

# The machine's own sources with a state of our own: its package lists may be old or missing.
private_apt() {
    apt-get -q \
        -o Dir::State="$staging/state" -o Dir::Cache="$staging/cache" \
        -o Dir::State::status=/dev/null \
        -o Acquire::Languages=none -o Acquire::Retries=3 -o APT::Sandbox::User=root "$@"
}

download() {
    mkdir -p "$staging/state/lists/partial" "$staging/cache/archives/partial"
    (private_apt update && cd "$staging" && private_apt download prometheus) >"$staging/log" 2>&1 ||
        die "cannot download prometheus: $(apt_complaint)"
}

stage promtool "$@"

download
dpkg -x "$staging"/prometheus_*.deb "$staging/root" || die "cannot unpack the package"
for program in prometheus promtool; do
    require_running "$staging/root/usr/bin/$program"
    mv "$staging/root/usr/bin/$program" "$dest/$program"
done
echo "fetch_prometheus: $("$dest/promtool" --version 2>&1 | head -n 1), in $dest"
