#!/bin/bash
# Usage: fetch_chromium.sh DEST
#
# Unpacks Debian's chromium, and the libraries that this machine lacks for it, into DEST, and writes the
# wrapper DEST/chromium.  Nothing is installed: apt works in private folders and is only let download.
# The wrapper is written last; if it is there, DEST is whole.
set -euo pipefail

instead="set CHROMIUM_BIN or put a chromium on PATH instead"
. "$(dirname "$0")/unpacking.sh"

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
        die "cannot download chromium: $(apt_complaint)"
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

stage chromium "$@"

download
unpack
write_wrapper
require_running "$staging/chromium"

rm -rf "$dest/root"
mv "$staging/root" "$dest/root"
mv "$staging/chromium" "$dest/chromium"
echo "fetch_chromium: $dest/chromium"
