"""Commands of setuptools that put the git commit into sdist and wheel, where it can be known.

pyproject.toml names them; sdists carry this file, so that wheels can be built from them.
"""

import os
import shutil
import subprocess
from pathlib import Path

from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent.parent
FILE = Path("proxy", "commit.txt")


def find_commit() -> str:
    """Return the commit from $SOURCE_COMMIT or git; the empty string if nobody knows it."""
    if "SOURCE_COMMIT" in os.environ:
        return os.environ["SOURCE_COMMIT"].strip()
    if not (ROOT / ".git").exists():  # an sdist brings its own file, whatever lies around it
        return ""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.check_output(command, cwd=ROOT, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def write_commit(folder: str) -> None:
    if commit := find_commit():
        path = Path(folder, FILE)
        path.unlink(missing_ok=True)  # it may be a hard link to a file of the source tree
        path.write_text(commit + "\n")


class BuildWithCommit(build_py):
    def run(self) -> None:
        if self.editable_mode:
            super().run()
            return
        # What an earlier build left there may not be part of it any more.
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        write_commit(self.build_lib)


class SdistWithCommit(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write_commit(base_dir)
        copy = Path(base_dir, Path(__file__).relative_to(ROOT))
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(__file__, copy)
