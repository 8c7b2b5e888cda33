"""Runs a program for a `Reader`; one that serves goes on behind the scenes once it is ready.

python behind.py NAME COMMAND... -- ARGUMENTS...
"""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

READY_SECONDS = 300.0
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def serves(name: str, arguments: list[str]) -> bool:
    """Return whether a program goes on until it is ended."""
    if name == "llama-swap":
        return True
    if name == "llama-server":
        return not {"--help", "--version"} & set(arguments) and "BEHIND" not in os.environ
    return arguments[:1] in (["serve"], ["run"])


def is_ready(name: str, arguments: list[str]) -> bool:
    """Return whether llama-server or llama-swap answers well, or the proxy keeps what it is asked."""
    if name == "llama-swap":
        return _answer(arguments[arguments.index("--listen") + 1]) == "OK"
    if name == "llama-server":
        port = arguments[arguments.index("--port") + 1]
        return _get(f"127.0.0.1:{port}").get("status") == "ok"
    return _get(os.environ["LLAMA_PREFIX_CACHE_ADMIN"]).get("state") in ("caching", "degraded")


def _get(address: str) -> dict[str, object]:
    try:
        return dict(json.loads(_answer(address)))
    except ValueError:
        return {}


def _answer(address: str) -> str:
    try:
        with _OPENER.open(f"http://{address}/health", timeout=10) as reply:
            return str(reply.read().decode())
    except (OSError, urllib.error.URLError):
        return ""


def start(name: str, command: list[str], arguments: list[str]) -> None:
    """Start a program in a session of its own, note its number, and wait until it is ready."""
    own = Path(os.environ["READER"])
    log_path = own / f"{name}.log"
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "BEHIND": name},
        )
    with (own / "started").open("a") as started:
        started.write(f"{process.pid}\n")
    deadline = time.monotonic() + READY_SECONDS
    while not is_ready(name, arguments):
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"{name} does not serve:\n{log_path.read_text(errors='replace')}")
        time.sleep(0.05)


def main() -> None:
    behind = sys.argv.index("--")
    name, command = sys.argv[1], sys.argv[2:behind]
    # The lab's llama-server changes its folder.
    arguments = [
        str(Path(a).absolute()) if Path(a).is_file() else a for a in sys.argv[behind + 1 :]
    ]
    if serves(name, arguments):
        start(name, command, arguments)
    else:
        os.execv(command[0], [*command, *arguments])


if __name__ == "__main__":
    main()
