#!/bin/bash
# Usage: fetch_engine.sh DEST
#
# Unpacks Debian 13's Docker (engine, BuildKit, Compose) and the libraries it needs into DEST/root, which a daemon can
# have as its root.  Nothing is installed.
set -euo pipefail

readonly SUITE=trixie
readonly PACKAGES="docker.io docker-cli docker-buildx docker-compose containerd runc tini libc6 libgcc-s1 libseccomp2
    libsystemd0 libcap2 libselinux1 libpcre2-8-0"

instead="leave out \`make test-image\`"
. "$(dirname "$0")/../lab/unpacking.sh"

stage root/usr/sbin/dockerd "$@"
archive=$(find_archive) || die "no Debian archive in this machine's apt configuration"
private_apt_from "$archive" "$SUITE"
download_packages $PACKAGES
mkdir -p "$staging/root"/{proc,sys,dev,run,tmp,root,before,project,folder,etc,var/lib/docker}
for name in bin sbin lib lib64; do
    ln -s "usr/$name" "$staging/root/$name"
done
ln -s /run "$staging/root/var/run"
unpack_root
echo "fetch_engine: $dest/root"
