# Sourced by the scripts here that unpack Debian's packages: their argument, a staging folder, complaints.
# `instead` is what the caller says can be done where nothing can be fetched.
readonly SCRIPT=$(basename "$0" .sh)

die() {
    echo "$SCRIPT: $1; $instead" >&2
    exit 1
}

# Takes the name of the program that is moved to DEST last, and the script's own arguments: if the program is
# there, DEST is whole.  Sets dest, and staging, which is deleted at the end.
stage() {
    local last=$1 tool
    shift
    [ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
    dest=$1
    [ ! -x "$dest/$last" ] || exit 0
    for tool in apt-get dpkg; do
        command -v "$tool" >/dev/null || die "$tool is missing (this script needs a Debian machine)"
    done
    mkdir -p "$dest"
    dest=$(cd "$dest" && pwd)
    staging=$(mktemp -d "$dest/.staging.XXXXXX")
    trap 'rm -rf "$staging"' EXIT
}

apt_complaint() {
    grep -m 1 -E '^[EW]:' "$staging/log" || echo "see apt"
}

# Downloads packages, not what they depend on, from the machine's own sources into the staging folder.
# apt gets a state of its own: the machine's package lists may be old or missing.
download_packages() {
    mkdir -p "$staging/state/lists/partial" "$staging/cache/archives/partial"
    (machine_apt update && cd "$staging" && machine_apt download "$@") >"$staging/log" 2>&1 ||
        die "cannot download $*: $(apt_complaint)"
}

# Unpacks the downloaded packages into DEST/root, in place of what was there.
unpack_root() {
    local package
    for package in "$staging"/*.deb; do
        dpkg -x "$package" "$staging/root" || die "cannot unpack $(basename "$package")"
    done
    rm -rf "$dest/root"
    mv "$staging/root" "$dest/root"
}

# The archive this machine already uses: the only one known to be reachable from here.
find_archive() {
    local codename uris
    codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    uris=$(apt-get --print-uris update 2>/dev/null)
    [ -n "$codename" ] && [[ $uris =~ \'([^\']*)/dists/$codename/ ]] && echo "${BASH_REMATCH[1]}"
}

# From now on packages come from another suite of an archive, and from nowhere else.
private_apt_from() {
    local keyring=/usr/share/keyrings/debian-archive-keyring.gpg signed_by=""
    [ ! -e "$keyring" ] || signed_by="[signed-by=$keyring] "
    echo "deb $signed_by$1 $2 main" >"$staging/sources.list"
    sources=(-o Dir::Etc::sourcelist="$staging/sources.list" -o Dir::Etc::sourceparts=/dev/null)
}

sources=()
machine_apt() {
    apt-get -q \
        -o Dir::State="$staging/state" -o Dir::Cache="$staging/cache" \
        -o Dir::State::status=/dev/null "${sources[@]}" \
        -o Acquire::Languages=none -o Acquire::Retries=3 -o APT::Sandbox::User=root "$@"
}

require_running() {
    "$1" --version >"$staging/log" 2>&1 ||
        die "the unpacked $(basename "$1") does not run: $(tail -n 1 "$staging/log")"
}
