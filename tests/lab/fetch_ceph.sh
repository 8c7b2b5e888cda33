#!/bin/bash
# Usage: fetch_ceph.sh DEST
#
# Unpacks Debian's Ceph (monitor, OSD, object gateway, tools) and the libraries it needs into DEST/root.  Nothing is
# installed.  The list of packages is what apt would install, less what only prepares real disks.
set -euo pipefail

instead="leave \`make test-shared\` without Ceph"
. "$(dirname "$0")/unpacking.sh"

readonly WANTED="radosgw ceph-mon ceph-osd ceph-common"
readonly NEEDLESS="sudo|lvm2|dmeventd|parted|smartmontools|nvme-cli|xfsprogs|gdisk|hdparm|dmidecode|cryptsetup-.*\
|uuid-runtime|libdevmapper.*|liblvm2.*|libparted2.*|libnvme1|libinih1|logrotate|cron.*|systemd.*"

wanted_packages() {
    mkdir -p "$staging/state/lists/partial" "$staging/cache/archives/partial"
    machine_apt update >"$staging/log" 2>&1 || die "cannot read the package lists: $(apt_complaint)"
    # What this machine has installed is not wanted again: its own status decides.
    machine_apt -o Dir::State::status=/var/lib/dpkg/status install --simulate --no-install-recommends $WANTED \
        2>>"$staging/log" | awk '/^Inst/ {print $2}' | grep -vxE "$NEEDLESS"
}

stage run "$@"

packages=$(wanted_packages) || die "apt knows no Ceph: $(apt_complaint)"
download_packages $packages
unpack_root
cat >"$staging/run" <<'WRAPPER'
#!/bin/sh
# Runs one of the unpacked programs: run ceph-mon ...
root=$(dirname "$(readlink -f "$0")")/root
libraries=$root/usr/lib/$(uname -m)-linux-gnu
export LD_LIBRARY_PATH="$root/lib/$(uname -m)-linux-gnu:$libraries:$libraries/ceph"
export PYTHONPATH="$root/usr/lib/python3/dist-packages"
program=$root/usr/bin/$1
shift
case $program in
    */ceph) exec python3.11 "$program" "$@" ;;
esac
exec "$program" "$@"
WRAPPER
chmod +x "$staging/run"
mv "$staging/run" "$dest/run"
for program in ceph-mon ceph-osd radosgw radosgw-admin ceph; do
    "$dest/run" $program --version >"$staging/log" 2>&1 || {
        rm "$dest/run"
        die "the unpacked $program does not run: $(tail -n 1 "$staging/log")"
    }
done
echo "fetch_ceph: $("$dest/run" radosgw --version), in $dest"
