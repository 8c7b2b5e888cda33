"""Results that were measured before, so that an interrupted run can be continued.

A result is taken again only for the very inputs it was measured with: trace, model file, llama-server,
how it was measured, and, behind the proxy, the proxy's source.
"""

import functools
import hashlib
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from tests.bench.traces.catalogue import TRACES
from tests.bench.traces.result import Case, Result
from tests.lab.models import model_path
from tests.lab.server import DEFAULT_MODEL_FOLDER, REPOSITORY, find_llama_server

MEASURING = ("exact.py", "measure.py", "measured_proxy.py", "play.py")
"""The modules that results depend on."""
RESULTS_FILE = REPOSITORY / ".lab" / "bench-results.jsonl"


class Stored(msgspec.Struct):
    """One line of the file; `inputs` is a digest."""

    inputs: str
    result: Result


class StoredResults:
    """The results in one file."""

    def __init__(self, file: Path = RESULTS_FILE) -> None:
        self._file = file

    def find(self, case: Case) -> list[Result]:
        """Return what was measured of a case with the same inputs, oldest first."""
        inputs = inputs_of(case)
        return [s.result for s in self._read() if s.inputs == inputs and s.result.case == case]

    def add(self, result: Result) -> None:
        line = msgspec.json.encode(Stored(inputs_of(result.case), result))
        with self._file.open("ab") as file:
            # First the line end: what was being written before may have been cut off.
            file.write(b"\n" + line)

    def _read(self) -> list[Stored]:
        if not self._file.exists():
            return []
        return list(_decode(self._file.read_bytes().splitlines()))


def _decode(lines: list[bytes]) -> Iterator[Stored]:
    """Yield what can be read; lines of other versions of the benchmark, or cut off, are passed over."""
    decoder = msgspec.json.Decoder(Stored)
    for line in lines:
        with suppress(msgspec.MsgspecError):
            yield decoder.decode(line)


def inputs_of(case: Case) -> str:
    """Return a digest of all that a result depends on."""
    model = model_path(case.kind, case.size, DEFAULT_MODEL_FOLDER)
    parts = [TRACES[case.trace]().digest(), _digest(model.parent, (model.name,)), _server_version()]
    parts.append(_digest(Path(__file__).parent, MEASURING))
    # Times are only compared if they were measured together.
    if case.has_proxy or case.size != "tiny":
        parts.append(_digest(REPOSITORY / "proxy", ("**/*.py",)))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@functools.cache
def _server_version() -> str:
    command = [str(find_llama_server()), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


@functools.cache
def _digest(folder: Path, patterns: tuple[str, ...]) -> str:
    sources = sorted(path for pattern in patterns for path in folder.glob(pattern))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
