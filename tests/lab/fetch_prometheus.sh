#!/bin/bash
# Usage: fetch_prometheus.sh DEST
#
# Unpacks Debian's prometheus and promtool into DEST.  Nothing is installed, and apt keeps what it
# learns in a private folder.  promtool is moved there last; if it is there, DEST is whole.
set -euo pipefail

instead="put prometheus and promtool on PATH instead"
. "$(dirname "$0")/unpacking.sh"

stage promtool "$@"

download_packages prometheus
dpkg -x "$staging"/prometheus_*.deb "$staging/root" || die "cannot unpack the package"
for program in prometheus promtool; do
    require_running "$staging/root/usr/bin/$program"
    mv "$staging/root/usr/bin/$program" "$dest/$program"
done
echo "fetch_prometheus: $("$dest/promtool" --version 2>&1 | head -n 1), in $dest"
