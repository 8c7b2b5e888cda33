"""A Ceph cluster with an object gateway, small enough for one machine: one monitor, three OSDs on files.

Debian's programs, unpacked by `fetch_ceph.sh`. There is no manager: no request of S3 needs one, and its
modules want forty more packages.
"""

import base64
import os
import struct
import subprocess
import time
import uuid
from pathlib import Path

from tests.lab.buckets import BUCKET, KEY_ID, RCLONE, SECRET, Bucket
from tests.lab.server import REPOSITORY, find_free_port
from tests.lab.waiting import wait_until

RUN = REPOSITORY / ".lab" / "ceph" / "run"
N_OSDS = 3
_COMMAND_SECONDS = 120
_SETTINGS = """\
[global]
fsid = {fsid}
mon host = [v2:{host}:{monitor_port}]
public addr = {host}
ms bind ipv6 = false
keyring = {folder}/keyring
run dir = {folder}
admin socket = {folder}/$name.asok
log file = {folder}/$name.log
pid file =
mon data = {folder}/mon
mon data avail crit = 1
osd data = {folder}/osd$id
osd objectstore = bluestore
bluestore block size = 8589934592
osd memory target = 939524096
osd class dir = {libraries}/rados-classes
erasure code dir = {libraries}/ceph/erasure-code
plugin dir = {libraries}/ceph
osd pool default size = 3
osd pool default min size = 2
osd pool default pg num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon max pg per osd = 1000
rgw data = {folder}
rgw frontends = beast endpoint={host}:{port}
"""


class Ceph(Bucket):
    """A cluster. Its process is radosgw: `stop` and `kill` end that alone, `close` ends all."""

    name = "ceph"

    def __init__(self, folder: Path, host: str = "127.0.0.1", inside: tuple[str, ...] = ()) -> None:
        super().__init__(folder, host, inside)
        self._daemons: list[subprocess.Popen[bytes]] = []

    def command(self) -> list[str]:
        return self._program("radosgw", "-n", "client.rgw", "-f")

    def start(self) -> None:
        is_new = not self._daemons
        if is_new:
            self._make_cluster()
        super().start()
        if is_new:
            keys = f"access_key_id={KEY_ID},secret_access_key={SECRET}"
            bucket = f":s3,provider=Ceph,{keys},endpoint='{self.base_url}':{BUCKET}"
            subprocess.run([RCLONE, "mkdir", bucket], check=True, timeout=_COMMAND_SECONDS)

    def close(self) -> None:
        """End everything; what was stored is not to be used again."""
        self.kill()
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()
        self._daemons = []

    def kill_osd(self) -> None:
        """End one OSD, as a crash would: two of three copies stay."""
        self._daemons[-1].kill()
        self._daemons[-1].wait()

    def _make_cluster(self) -> None:
        fsid, port = str(uuid.uuid4()), find_free_port()
        self._write_settings(fsid, port)
        (self.folder / "mon").mkdir()
        map_path = self.folder / "monmap"
        address = f"[v2:{self.host}:{port}]"
        self._call("monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, str(map_path))
        keyring = str(self.folder / "keyring")
        self._call("ceph-mon", "--mkfs", "-i", "a", "--monmap", str(map_path), "--keyring", keyring)
        self._daemon("ceph-mon", "-i", "a")
        identities = [str(uuid.uuid4()) for _ in range(N_OSDS)]
        for identity in identities:  # they are numbered in this order
            self._call("ceph", "osd", "new", identity)
        for number, identity in enumerate(identities):
            (self.folder / f"osd{number}").mkdir()
            self._call("ceph-osd", "-i", str(number), "--mkfs", "--osd-uuid", identity)
            self._daemon("ceph-osd", "-i", str(number))
        wait_until(lambda: self._call("ceph", "osd", "stat").split()[2] == str(N_OSDS))
        named = ("--uid", "lab", "--display-name", "lab")
        keys = ("--access-key", KEY_ID, "--secret-key", SECRET)
        self._call("radosgw-admin", "-n", "client.rgw", "user", "create", *named, *keys)

    def _write_settings(self, fsid: str, monitor_port: int) -> None:
        libraries = RUN.parent / "root/usr/lib" / f"{os.uname().machine}-linux-gnu"
        settings = _SETTINGS.format(
            fsid=fsid,
            host=self.host,
            port=self.port,
            monitor_port=monitor_port,
            folder=self.folder,
            libraries=libraries,
        )
        (self.folder / "ceph.conf").write_text(settings)
        everything = {"mon": "allow *", "osd": "allow *", "mgr": "allow *", "mds": "allow *"}
        owners = ["mon.", "client.admin", "client.rgw", *(f"osd.{n}" for n in range(N_OSDS))]
        lines = [
            f"[{owner}]\n\tkey = {_new_key()}\n"
            + "".join(f'\tcaps {name} = "{allowed}"\n' for name, allowed in everything.items())
            for owner in owners
        ]
        (self.folder / "keyring").write_text("".join(lines))

    def _program(self, name: str, *arguments: str) -> list[str]:
        return [*self.inside, str(RUN), name, "-c", str(self.folder / "ceph.conf"), *arguments]

    def _call(self, name: str, *arguments: str) -> str:
        command = self._program(name, *arguments)
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS)
        assert done.returncode == 0, f"{name} {arguments}: {done.stderr}"
        return done.stdout

    def _daemon(self, name: str, *arguments: str) -> None:
        with self.log_path.open("ab") as log:
            command = self._program(name, *arguments, "-f")
            self._daemons.append(subprocess.Popen(command, stdout=log, stderr=log))


def _new_key() -> str:
    """Return a cephx key: its type (AES), when it was made, the length and 16 random bytes."""
    header = struct.pack("<hiih", 1, int(time.time()), 0, 16)
    return base64.b64encode(header + os.urandom(16)).decode()
