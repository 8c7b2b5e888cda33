#!/bin/bash
# Usage: fetch_haproxy.sh DEST
#
# Unpacks Debian's HAProxy and the libraries that it needs into DEST.  Nothing is installed.  The wrapper
# DEST/haproxy is moved there last; if it is there, DEST is whole.
set -euo pipefail

instead="put haproxy on PATH instead"
. "$(dirname "$0")/unpacking.sh"

stage haproxy "$@"

download_packages haproxy liblua5.3-0 libopentracing1 libopentracing-c-wrapper0
unpack_root
cat >"$staging/haproxy" <<'WRAPPER'
#!/bin/sh
root=$(dirname "$(readlink -f "$0")")/root
export LD_LIBRARY_PATH="$root/usr/lib/$(uname -m)-linux-gnu"
exec "$root/usr/sbin/haproxy" "$@"
WRAPPER
chmod +x "$staging/haproxy"
mv "$staging/haproxy" "$dest/haproxy"
version=$("$dest/haproxy" -v 2>&1) || { rm "$dest/haproxy"; die "the unpacked haproxy does not run: $version"; }
echo "fetch_haproxy: $(echo "$version" | head -n 1), in $dest"
