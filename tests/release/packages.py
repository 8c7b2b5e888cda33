"""The wheel and the sdist: built, looked into, and installed into environments of their own."""

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]
GENERATED = {"proxy/commit.txt"}


class Packages(NamedTuple):
    """What a build has made."""

    sdist: Path
    wheel: Path


def build(folder: Path) -> Packages:
    """Build the sdist, and the wheel from the sdist, as somebody without git would."""
    run_module("build", "--outdir", str(folder), str(REPOSITORY))
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return Packages(sdist, wheel)


def write_bill(wheel: Path) -> Path:
    """Write the bill of materials beside the wheel: what the image installs, as CycloneDX; return it."""
    bill = wheel.with_suffix(".cdx.json")
    lock, project = REPOSITORY / "deploy/requirements.lock", REPOSITORY / "pyproject.toml"
    told = ("--output-reproducible", "--pyproject", str(project), "--output-file", str(bill))
    run_module("cyclonedx_py", "requirements", *told, str(lock))
    return bill


def missing_from(packages: Packages) -> list[str]:
    """Return what is under version control in proxy/ but not in a package, or the other way round."""
    listed = run("git", "-C", str(REPOSITORY), "ls-files", "proxy").splitlines()
    tracked = {name for name in listed if (REPOSITORY / name).exists()}
    complaints = []
    contents = {
        packages.wheel.name: _in_wheel(packages.wheel),
        packages.sdist.name: _in_sdist(packages.sdist),
    }
    for package, names in contents.items():
        complaints += [f"{package} lacks {name}" for name in sorted(tracked - names)]
        foreign = names - tracked - GENERATED
        complaints += [f"{package} has {name}, unknown to git" for name in sorted(foreign)]
    return complaints


def _in_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if name.startswith("proxy/")}


def _in_sdist(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as archive:
        files = (member.name.partition("/")[2] for member in archive if member.isfile())
        return {name for name in files if name.startswith("proxy/")}


def install(package: Path, folder: Path) -> Path:
    """Install a package with what it needs, and nothing else, into *folder*; return its python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    run(str(python), "-m", "pip", "install", "--quiet", str(package))
    run(str(python), "-m", "pip", "check")
    return python


def run_module(name: str, *arguments: str) -> str:
    """Return what a module of this environment has printed."""
    return run(sys.executable, "-m", name, *arguments, cwd=REPOSITORY)


def run(*command: str, cwd: Path | None = None) -> str:
    """Return what a command has printed; raises CalledProcessError, with that printed, if it fails."""
    # With PYTHONPATH set, pip would find this folder's own package installed already.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        print(done.stdout, file=sys.stderr)
    done.check_returncode()
    return done.stdout
