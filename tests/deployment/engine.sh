#!/bin/bash
# Usage: unshare --mount engine.sh ROOT PROJECT FOLDER
#
# Becomes Docker's daemon, with ROOT as its root: with a mere chroot it could start no health checks.  PROJECT and FOLDER
# are /project and /folder there; its data are in FOLDER.
set -euo pipefail
root=$1
mount --make-rprivate /
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/run"
mount -t tmpfs tmpfs "$root/tmp"
mount --bind "$2" "$root/project"
mount --bind "$3" "$root/folder"
mkdir -p "$3/data"
mount --bind "$3/data" "$root/var/lib/docker"
cp /etc/resolv.conf /etc/hosts "$root/etc/"
cd "$root"
pivot_root . before
export PATH=/usr/sbin:/usr/bin HOME=/root
exec dockerd --bridge=none --iptables=false --ip6tables=false
