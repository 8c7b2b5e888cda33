"""llama.cpp's own server tests on llama-server alone and through the proxy.

The tests come from the sdist of llama-cpp-python on PyPI, unchanged. They start llama-server by
LLAMA_SERVER_BIN_PATH, which is this module here: it puts one of the lab's random models in the place of
those that the tests would download, and serves alone or by `llama-prefix-cache run`. Tests that want what a
real model writes fail either way. Exit status 1 if one passes alone but not through the proxy.

python -m tests.bench.server_tests [--kind KIND] [FILE ...]
"""

import argparse
import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from tests.lab.models import MEMORIES, model_path
from tests.lab.server import DEFAULT_MODEL_FOLDER, REPOSITORY, find_free_port, find_llama_server

VERSION = "0.3.36"
FOLDER = REPOSITORY / ".lab" / "server-tests"
INSIDE = f"llama_cpp_python-{VERSION}/vendor/llama.cpp/tools/server/tests/"
PACKAGES = (
    "filelock",
    "numpy",
    "openai",
    "pytest",
    "requests",
    "wget",
    "aiohttp",
    "prometheus-client",
)
FILES = (
    *("basic", "chat_completion", "compat_anthropic", "compat_oai_responses", "completion"),
    *("ctx_shift", "ignore_eos", "infill", "kv_keep_only_active", "metrics", "security"),
    *("slot_save", "stream", "template", "tokenize", "tool_call"),
)
DOWNLOADED = {"--hf-repo": 2, "--hf-file": 2, "--model-url": 2, "--offline": 1, "--mmproj-url": 2}
"""Flags that name something to download, with the number of their words."""


def fetch() -> None:
    """Download the tests and what they import, unless they are there."""
    if (FOLDER / "tests" / "utils.py").exists():
        return
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    packages = ["install", "--upgrade", "--target", str(FOLDER / "packages"), *PACKAGES]
    subprocess.run([*pip, *packages], check=True)
    with tempfile.TemporaryDirectory() as folder:
        name = "llama-cpp-python"
        sdist = ["download", "--no-deps", "--no-binary", name, "--dest", folder]
        subprocess.run([*pip, *sdist, f"{name}=={VERSION}"], check=True)
        [archive] = Path(folder).iterdir()
        with tarfile.open(archive) as opened:
            members = [m for m in opened.getmembers() if m.name.startswith(INSIDE)]
            for member in members:
                member.name = "tests/" + member.name.removeprefix(INSIDE)
            opened.extractall(FOLDER, members, filter="data")


def replaced(arguments: list[str], model: str) -> list[str]:
    """Return llama-server's arguments with *model* instead of what would be downloaded."""
    kept, rest = ["--model", model, "-t", "1"], list(arguments)
    while rest:
        n_words = DOWNLOADED.get(rest[0], 0)
        if not n_words:
            kept.append(rest[0])
        rest = rest[n_words or 1 :]
    return kept


def serve(way: str, model: str, arguments: list[str]) -> None:
    """Become llama-server, or the proxy with llama-server behind it on a port of its own."""
    command = [str(find_llama_server()), *replaced(arguments, model)]
    if way == "proxy":
        place = command.index("--port")
        port = command[place + 1]
        command[place + 1] = "0"
        listeners = ["--listen", f"127.0.0.1:{port}", "--admin", f"127.0.0.1:{find_free_port()}"]
        slots = ["--slot-save-path", tempfile.mkdtemp(prefix="prefix-cache-")]
        if "--slot-save-path" in command:
            slots = []
        command = [sys.executable, "-m", "proxy", "run", *listeners, *slots, "--", *command]
    os.execv(command[0], command)


def outcomes(way: str, kind: str, files: list[str]) -> dict[str, bool]:
    """Return which of the tests that ran have passed, by name."""
    model = model_path(kind, "tiny", DEFAULT_MODEL_FOLDER)
    with tempfile.TemporaryDirectory() as folder:
        script, report = Path(folder) / "llama-server", Path(folder) / "report.xml"
        own = shlex.join(
            [sys.executable, "-m", "tests.bench.server_tests", "serve", way, str(model)]
        )
        script.write_text(f'#!/bin/sh\nexport PYTHONPATH={REPOSITORY}\nexec {own} "$@"\n')
        script.chmod(0o755)
        places = {"LLAMA_SERVER_BIN_PATH": str(script), "PYTHONPATH": str(FOLDER / "packages")}
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no"]
        ran = [*pytest, f"--junitxml={report}", *(f"unit/test_{name}.py" for name in files)]
        environment = os.environ | places | {"PORT": str(find_free_port())}
        subprocess.run(ran, cwd=FOLDER / "tests", env=environment, stdout=sys.stderr)
        cases = ElementTree.parse(report).iter("testcase")
        return {
            f"{case.get('classname')}::{case.get('name')}": case.find("failure") is None
            and case.find("error") is None
            for case in cases
            if case.find("skipped") is None
        }


def main() -> int:
    """Run the tests both ways, or serve for one of them."""
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], sys.argv[3], sys.argv[4:])
    parser = argparse.ArgumentParser(description="Run llama.cpp's server tests through the proxy.")
    parser.add_argument("--kind", choices=MEMORIES, default="full")
    parser.add_argument("file", nargs="*", default=list(FILES), metavar="FILE")
    given = parser.parse_args()
    fetch()
    alone, through = (outcomes(way, given.kind, given.file) for way in ("alone", "proxy"))
    passed = {name for name, is_passed in alone.items() if is_passed}
    lost = sorted(name for name in passed if not through.get(name))
    print(f"{len(alone)} tests; {len(passed)} pass on llama-server alone")
    print(f"{len(passed) - len(lost)} of these pass through the proxy")
    print(*(f"  not {name}" for name in lost), sep="\n")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
