#!/bin/bash
# Usage: fetch_nginx.sh DEST
#
# Unpacks Debian's nginx into DEST.  Nothing is installed, and apt keeps what it learns in a private
# folder.  nginx is moved there last; if it is there, DEST is whole.
set -euo pipefail

instead="put nginx on PATH instead"
. "$(dirname "$0")/unpacking.sh"

stage nginx "$@"

download_packages nginx
dpkg -x "$staging"/nginx_*.deb "$staging/root" || die "cannot unpack the package"
version=$("$staging/root/usr/sbin/nginx" -v 2>&1) || die "the unpacked nginx does not run: $version"
mv "$staging/root/usr/sbin/nginx" "$dest/nginx"
echo "fetch_nginx: $version, in $dest"
