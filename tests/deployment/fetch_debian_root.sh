#!/bin/bash
# Usage: fetch_debian_root.sh DEST.tar [SUITE]
#
# Packs a bare Debian, by default 12, into DEST.tar, from the archive that this machine already uses.  Nothing is
# installed: mmdebstrap is unpacked, and apt works in a private state folder.  Needs root and perl.
set -euo pipefail

readonly SUITE=bookworm
readonly KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg

[ $# -ge 1 ] || { echo "usage: $0 DEST.tar [SUITE]" >&2; exit 2; }
[ ! -e "$1" ] || exit 0

find_archive() {
    local uris
    uris=$(apt-get --print-uris update 2>/dev/null)
    [[ $uris =~ \'([^\']*)/dists/$SUITE/ ]] && echo "${BASH_REMATCH[1]}"
}

dest=$(realpath "$1")
mkdir -p "$(dirname "$dest")"
staging=$(mktemp -d)
trap 'rm -rf "$staging"' EXIT
archive=$(find_archive) || { echo "fetch_debian_root: this machine's apt has no $SUITE" >&2; exit 1; }
source="deb [signed-by=$KEYRING] $archive $SUITE main"

mkdir -p "$staging"/{state/lists/partial,cache/archives/partial,packages}
echo "$source" >"$staging/sources.list"
private_apt() {
    apt-get -qq \
        -o Dir::State="$staging/state" -o Dir::Cache="$staging/cache" -o Dir::State::status=/dev/null \
        -o Dir::Etc::sourcelist="$staging/sources.list" -o Dir::Etc::sourceparts=/dev/null \
        -o Acquire::Languages=none -o APT::Sandbox::User=root "$@"
}
private_apt update
(cd "$staging/packages" && private_apt download mmdebstrap)
dpkg -x "$staging"/packages/mmdebstrap_*.deb "$staging/root"
chmod 755 "$staging"
# A copy of the archive may be older than the archive says that its lists are valid.
TMPDIR=$staging perl "$staging/root/usr/bin/mmdebstrap" --mode=root --variant=minbase --quiet \
    --aptopt="$(apt-config dump Acquire::Check-Valid-Until)" \
    "${2:-$SUITE}" "$staging/debian.tar" "${source/ $SUITE / ${2:-$SUITE} }"
mv "$staging/debian.tar" "$dest"
echo "fetch_debian_root: $dest"
