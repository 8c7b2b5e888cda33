"""Where the pinned clients are, how one is run headless, and the repository that it works in.

Owns the environment of a client: nothing of the caller's but PATH, a home folder of its own, and no way
to any host but loopback that it would use without being asked.
"""

import asyncio
import subprocess
from pathlib import Path

from tests.lab.conversation import prose
from tests.lab.server import REPOSITORY

FOLDER = REPOSITORY / ".lab" / "clients" / "node_modules"
RUN_SECONDS = 600.0


class ClientError(Exception):
    """A client is not installed, failed, or did not end."""


def find_program(pattern: str) -> Path:
    """Return the one native program of a client that was built for this machine."""
    found = sorted(FOLDER.glob(pattern))
    if not found:
        raise ClientError(f"no {pattern} in {FOLDER}: run `make test-clients`")
    return found[0]


async def run(
    program: Path, arguments: list[str], folder: Path, environment: dict[str, str]
) -> bytes:
    """Run a client to its end and return what it printed."""
    process = await asyncio.create_subprocess_exec(
        str(program),
        *arguments,
        cwd=folder,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(RUN_SECONDS):
            printed, complaints = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise ClientError(
            f"{program.name} ended with {process.returncode}: {printed!r} {complaints!r}"
        )
    return printed


def make_repository(folder: Path) -> Path:
    """Make a small git repository of our own texts, with one commit."""
    (folder / "src").mkdir(parents=True)
    (folder / "README.md").write_text(f"# Shop\n\n{prose(1, 40)}\n")
    for part in ("one", "two", "three"):
        lines = (f"{part}_{i} = {i}  # {prose(i, 6)}\n" for i in range(30))
        (folder / "src" / f"{part}.py").write_text("".join(lines))
    git(folder, "init", "-q", "-b", "main")
    commit(folder, "A shop")
    return folder


def commit(folder: Path, message: str) -> None:
    git(folder, "add", "-A")
    name = ("-c", "user.name=Lab", "-c", "user.email=lab@localhost")
    git(folder, *name, "commit", "-q", "-m", message)


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True)
