#!/bin/bash
# Usage: fetch_prometheus.sh DEST
#
# Unpacks Debian's prometheus and promtool into DEST.  Nothing is installed, and apt keeps what it
# learns in a private folder.  promtool is moved there last; if it is there, DEST is whole.
set -euo pipefail

die() {
    echo "fetch_prometheus: $1; put prometheus and promtool on PATH instead" >&2
    exit 1
}

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
        die "cannot download prometheus: $(grep -m 1 -E '^[EW]:' "$staging/log" || echo "see apt")"
}

[ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
dest=$1
[ ! -x "$dest/promtool" ] || exit 0

for tool in apt-get dpkg; do
    command -v "$tool" >/dev/null || die "$tool is missing (this script needs a Debian machine)"
done
mkdir -p "$dest"
dest=$(cd "$dest" && pwd)
staging=$(mktemp -d "$dest/.staging.XXXXXX")
trap 'rm -rf "$staging"' EXIT

download
dpkg -x "$staging"/prometheus_*.deb "$staging/root" || die "cannot unpack the package"
for program in prometheus promtool; do
    "$staging/root/usr/bin/$program" --version >"$staging/log" 2>&1 ||
        die "the unpacked $program does not run: $(tail -n 1 "$staging/log")"
    mv "$staging/root/usr/bin/$program" "$dest/$program"
done
echo "fetch_prometheus: $("$dest/promtool" --version 2>&1 | head -n 1), in $dest"
