"""llama.cpp's own server tests on llama-server alone and through the proxy.

The tests come from the sdist of llama-cpp-python on PyPI, unchanged. They start llama-server by
LLAMA_SERVER_BIN_PATH, which is this module here: it puts one of the lab's random models in the place of
those that the tests would download, and serves alone or by `llama-prefix-cache run`. Tests that want what a
real model writes fail either way. A file of tests that does not end in time is ended. Exit status 1 if a
test passes alone but not through the proxy.

python -m tests.bench.server_tests [--kind KIND] [--limit SECONDS] [--document] [FILE ...]
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree

from tests.bench.document import add_page_arguments, prove
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.lab.models import MEMORIES, model_path
from tests.lab.server import DEFAULT_MODEL_FOLDER, REPOSITORY, find_free_port, find_llama_server

ALONE, THROUGH_PROXY = "alone", "proxy"
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
    *("slot_save", "stream", "tokenize"),
)
"""Of `template` and `tool_call` no test passes with a random model."""
PYTEST = """
import json, os, sys, pytest, utils

class Wanted:
    def pytest_collection_modifyitems(self, items):
        wanted = json.loads(os.environ["WANTED"])
        items[:] = [item for item in items if wanted is None or item.name in wanted]

utils.ServerPreset.load_all = staticmethod(lambda: None)
sys.exit(pytest.main(sys.argv[1:], [Wanted()]))
"""
"""pytest on the wanted tests, without the start of every model that would be downloaded first."""
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
    if way == THROUGH_PROXY:
        place = command.index("--port")
        port = command[place + 1]
        command[place + 1] = "0"
        listeners = ["--listen", f"127.0.0.1:{port}", "--admin", f"127.0.0.1:{find_free_port()}"]
        slots = ["--slot-save-path", tempfile.mkdtemp(prefix="prefix-cache-")]
        if "--slot-save-path" in command:
            slots = []
        command = [sys.executable, "-m", "proxy", "run", *listeners, *slots, "--", *command]
    os.execv(command[0], command)


def outcomes(
    way: str, kind: str, name: str, limit_seconds: float, wanted: set[str] | None = None
) -> dict[str, bool]:
    """Return which tests of one file have passed, of the wanted ones or all.

    Raises TimeoutExpired if they do not end in time.
    """
    model = model_path(kind, "tiny", DEFAULT_MODEL_FOLDER)
    with tempfile.TemporaryDirectory(prefix="prefix-cache-") as folder:
        script, report = Path(folder) / "llama-server", Path(folder) / "report.xml"
        own = shlex.join(
            [sys.executable, "-m", "tests.bench.server_tests", "serve", way, str(model)]
        )
        script.write_text(f'#!/bin/sh\nexport PYTHONPATH={REPOSITORY}\nexec {own} "$@"\n')
        script.chmod(0o755)
        places = {
            "LLAMA_SERVER_BIN_PATH": str(script),
            "PYTHONPATH": f"{FOLDER}/packages:{FOLDER}/tests",
        }
        pytest = [sys.executable, "-c", PYTEST, "-q", "-p", "no:cacheprovider", "--tb=line"]
        ran = [*pytest, f"--junitxml={report}", f"unit/test_{name}.py"]
        environment = os.environ | places | {"PORT": str(find_free_port()), "TMPDIR": folder}
        environment["WANTED"] = json.dumps(None if wanted is None else sorted(wanted))
        _run_within(limit_seconds, ran, FOLDER / "tests", environment)
        cases = ElementTree.parse(report).iter("testcase")
        return {
            str(case.get("name")): case.find("failure") is None and case.find("error") is None
            for case in cases
            if case.find("skipped") is None
        }


def _run_within(
    limit_seconds: float, command: list[str], folder: Path, environment: dict[str, str]
) -> None:
    """Run a command; whatever it started is gone afterwards."""
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=sys.stderr, start_new_session=True
    )
    try:
        process.wait(limit_seconds)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def compare(section: Section, kind: str, name: str, limit_seconds: float) -> None:
    """Add the row of one file.

    Tests that fail alone are not run through the proxy: they tell nothing, and most take its start and end.
    """
    way = ALONE
    try:
        tell(f"{name}, {way}")
        alone = outcomes(way, kind, name, limit_seconds)
        passed = {test for test, is_passed in alone.items() if is_passed}
        way = THROUGH_PROXY
        tell(f"{name}, {way}")
        through = outcomes(way, kind, name, limit_seconds, passed)
    except subprocess.TimeoutExpired:
        late = f"{way} not ended after {limit_seconds:.0f} s"
        section.add(name, "-", "-", late, "-", is_met=None if way == ALONE else False)
        return
    lost = sorted(test for test in passed if not through.get(test))
    names = ", ".join(f"`{test}`" for test in lost) or "-"
    section.add(name, len(alone), len(passed), len(passed) - len(lost), names, is_met=not lost)


def main() -> int:
    """Run the tests both ways, or serve for one of them."""
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], sys.argv[3], sys.argv[4:])
    parser = argparse.ArgumentParser(description="Run llama.cpp's server tests through the proxy.")
    parser.add_argument("--kind", choices=MEMORIES, default="full")
    parser.add_argument("--limit", type=float, default=120, help="seconds for each file and side")
    parser.add_argument("file", nargs="*", default=list(FILES), metavar="FILE")
    add_page_arguments(parser)
    given = parser.parse_args()
    fetch()
    section = Section(
        f"llama.cpp's server tests ({given.kind})",
        "what passes alone passes through the proxy",
        ("file", "tests", "pass alone", "of these through the proxy", "the others"),
    )
    for name in given.file:
        compare(section, given.kind, name, given.limit)
        prove(given, "server tests", [section])
    print(section.markdown())
    return 1 if section.n_missed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
