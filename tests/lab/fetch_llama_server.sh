#!/bin/bash
# Usage: fetch_llama_server.sh DEST
#
# Unpacks Debian's llama-server and the libraries it needs into DEST, and writes the wrapper
# DEST/llama-server.  Nothing is installed: apt works in a private state folder, so the suite is
# never added to this machine's sources.  The wrapper is written last; if it is there, DEST is whole.
set -euo pipefail

readonly PACKAGES="llama.cpp-tools libllama0 libggml0 libc6 libstdc++6 libgcc-s1 libgomp1
    libssl3t64 zlib1g libzstd1"
readonly SUITES="forky sid"

instead="set LLAMA_SERVER_BIN or put a llama-server on PATH instead"
. "$(dirname "$0")/unpacking.sh"

download_from() {
    local suite=$1 archive=$2
    rm -rf "$staging"/{state,cache,packages}
    mkdir -p "$staging/state/lists/partial" "$staging/cache/archives/partial" "$staging/packages"
    private_apt_from "$archive" "$suite"
    machine_apt update && (cd "$staging/packages" && machine_apt download $PACKAGES)
}

download() {
    local archive=$1 suite
    for suite in $SUITES; do
        if download_from "$suite" "$archive" >>"$staging/log" 2>&1; then
            echo "fetch_llama_server: packages from suite $suite"
            return
        fi
    done
    die "cannot download llama.cpp-tools: $(apt_complaint)"
}

unpack() {
    local package
    for package in "$staging"/packages/*.deb; do
        dpkg -x "$package" "$staging/root" || die "cannot unpack $(basename "$package")"
    done
}

# Prints the path, relative to the root folder, of the one thing that find's expression selects.
locate() {
    local what=$1 found
    shift
    found=$(cd "$staging/root" && find . "$@" | sort | head -n 1)
    [ -n "$found" ] || die "the Debian packages hold no $what"
    echo "${found#./}"
}

# A router starts its children by its own path in /proc: it must be llama-server that the kernel starts, and not
# the loader with llama-server as an argument.  The path that names the loader has a fixed room in the program.
name_loader() {
    local server=$staging/root/$1 loader=$2 named
    named=$(LC_ALL=C grep -a -o -m 1 '/lib[0-9a-z/]*/ld-linux[-a-z0-9_.]*' "$server") || die "$1 names no loader"
    [ ${#loader} -le ${#named} ] || die "there is no room in $1 to name $loader"
    LC_ALL=C sed -i "s|$named\\x00|$loader$(printf '\\x00%.0s' $(seq ${#loader} ${#named}))|" "$server"
}

# The folder is changed for the backends, which are looked for in it, and for the loader, which is named relative to
# it; arguments that are relative paths are made absolute before that.
write_wrapper() {
    local loader server libc backends implementation
    loader=$(locate "dynamic loader" -name 'ld-linux*.so.*' -type f)
    server=$(locate "llama-server" -path '*/bin/llama-server' -type f)
    libc=$(locate "libc" -name 'libc.so.6')
    implementation=$(locate "server library" -name 'libllama-server-impl.so*')
    backends=$(locate "CPU backend folder" -name 'backends*' -type d)
    name_loader "$server" "$(realpath --relative-to="$staging/root/$backends" "$staging/root/$loader")"
    cat >"$staging/llama-server" <<WRAPPER
#!/bin/sh
# Runs the unpacked llama-server with its own C library.
for argument; do
    shift
    case \$argument in
        -* | /*) ;;
        *) [ ! -e "\$argument" ] || argument=\$PWD/\$argument ;;
    esac
    set -- "\$@" "\$argument"
done
root=\$(dirname "\$(readlink -f "\$0")")/root
cd "\$root/$backends" || exit 1
export LD_LIBRARY_PATH="\$root/$(dirname "$libc"):\$root/$(dirname "$implementation")"
exec "\$root/$server" "\$@"
WRAPPER
    chmod +x "$staging/llama-server"
}

stage llama-server "$@"

archive=$(find_archive) || die "no Debian archive in this machine's apt configuration"
download "$archive"
unpack
write_wrapper
require_running "$staging/llama-server"

rm -rf "$dest/root"
mv "$staging/root" "$dest/root"
mv "$staging/llama-server" "$dest/llama-server"
echo "fetch_llama_server: $dest/llama-server"
