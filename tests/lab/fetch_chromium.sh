#!/bin/bash
# Usage: fetch_chromium.sh DEST
#
# Unpacks Debian's chromium, and the libraries that this machine lacks for it, into DEST, and writes the
# wrapper DEST/chromium.  Nothing is installed: apt works in private folders and is only let download.
# The wrapper is written last; if it is there, DEST is whole.
set -euo pipefail

die() {
    echo "fetch_chromium: $1; set CHROMIUM_BIN or put a chromium on PATH instead" >&2
    exit 1
}

# What is installed already counts, so that only what is missing is downloaded.
private_apt() {
    apt-get -q -y --no-install-recommends --download-only \
        -o Dir::State::lists="$staging/lists" -o Dir::Cache="$staging/cache" \
        -o Dir::State::extended_states="$staging/extended_states" -o Debug::NoLocking=true \
        -o Acquire::Languages=none -o Acquire::Retries=3 -o APT::Sandbox::User=root "$@"
}

download() {
    mkdir -p "$staging/lists/partial" "$staging/cache/archives/partial"
    private_apt update >>"$staging/log" 2>&1 && private_apt install chromium >>"$staging/log" 2>&1 ||
        die "cannot download chromium: $(grep -m 1 -E '^[EW]:' "$staging/log" || echo "see apt")"
}

unpack() {
    local package
    for package in "$staging"/cache/archives/*.deb; do
        dpkg -x "$package" "$staging/root" || die "cannot unpack $(basename "$package")"
    done
}

write_wrapper() {
    local folders
    [ -x "$staging/root/usr/lib/chromium/chromium" ] || die "the Debian packages hold no chromium"
    folders=$(cd "$staging/root" && find . -name 'lib*.so*' ! -path '*/chromium/*' -printf '$root/%P\n' |
        xargs -r -d '\n' -n 1 dirname | sort -u | paste -sd :)
    cat >"$staging/chromium" <<WRAPPER
#!/bin/sh
root=\$(dirname "\$(readlink -f "\$0")")/root
export LD_LIBRARY_PATH="$folders"
[ -d /etc/fonts ] || export FONTCONFIG_SYSROOT="\$root"
exec "\$root/usr/lib/chromium/chromium" "\$@"
WRAPPER
    chmod +x "$staging/chromium"
}

[ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
dest=$1
[ ! -x "$dest/chromium" ] || exit 0

for tool in apt-get dpkg; do
    command -v "$tool" >/dev/null || die "$tool is missing (this script needs a Debian machine)"
done
mkdir -p "$dest"
dest=$(cd "$dest" && pwd)
staging=$(mktemp -d "$dest/.staging.XXXXXX")
trap 'rm -rf "$staging"' EXIT

download
unpack
write_wrapper
"$staging/chromium" --version >"$staging/log" 2>&1 ||
    die "the unpacked chromium does not run: $(tail -n 1 "$staging/log")"

rm -rf "$dest/root"
mv "$staging/root" "$dest/root"
mv "$staging/chromium" "$dest/chromium"
echo "fetch_chromium: $dest/chromium"
