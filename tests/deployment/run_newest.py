"""`make test-newest`: the tests on the newest Python that Debian has.

Users of Homebrew, Fedora and Arch have it too. The root is in memory, its mounts are its own. Needs root.
Arguments go to pytest.
"""

import sys
import tempfile
from pathlib import Path
from shlex import join

from tests.deployment.namespaces import leave_mounts, mount, online, run_in, unmount, unpack_debian
from tests.deployment.run_bare import FOLDER, clone, timed
from tests.lab.server import REPOSITORY

PACKED = REPOSITORY / ".lab" / "debian-sid.tar"
NEEDED = "python3-venv make git procps iproute2 curl"
LIVE = ("main_job", "restarts", "run", "commands", "doctor")
TESTS = (
    *("tests/unit", "tests/store", "tests/integration"),
    *(f"tests/live/test_{name}.py" for name in LIVE),
)


def main() -> int:
    """Return 0 if all tests pass there."""
    leave_mounts()
    with tempfile.TemporaryDirectory(prefix="newest-") as folder:
        root = Path(folder, "root")
        try:
            unpack_debian(root, PACKED)
            clone(root)
            test(root)
        finally:
            unmount(root)
    return 0


def test(root: Path) -> None:
    """Install the project with that Python, and run the tests; raises CalledProcessError."""
    lab = root / FOLDER.lstrip("/") / ".lab"
    lab.mkdir()
    mount("--bind", "-o", "ro", str(REPOSITORY / ".lab"), str(lab))
    with online(root):
        with timed("setup"):
            install = f"apt-get install -y --no-install-recommends {NEEDED}"
            run_in(root, f"apt-get update && {install}", {})
            run_in(root, "make PYTHON=python3 setup", {}, FOLDER)
        tests = join(sys.argv[1:] or TESTS)
        with timed("tests"):
            run_in(root, f".venv/bin/python -m pytest -n 4 --dist worksteal {tests}", {}, FOLDER)


if __name__ == "__main__":
    sys.exit(main())
