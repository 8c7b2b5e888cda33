"""How many of 500 damaged indexes are opened or made anew: python -m tests.bench.damaged_indexes

Each damaged index is worked on by processes of their own: `ls`, `check`, `check --fix`, and a store that is
opened, made anew and saved into. Half of the indexes were closed (and have a checksum), half were left as
by kill -9.
`cost N` measures what looking costs for an index of N checkpoints.
"""

import asyncio
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path

from proxy.__main__ import main as proxy_main
from proxy.core.model import Checkpoint, CheckpointId, CheckpointKind
from proxy.core.tokens import Namespace, PrefixHash, TokenIds, hash_prefixes, token_ids
from proxy.store.files import seal_of
from proxy.store.index import Index, sound_file
from tests.store.conftest import new_state, opened, run_of
from tests.store.damage import (
    flipped,
    leave_unsealed,
    put_bad_record,
    put_unreadable,
    scribbled,
    truncated,
)
from tests.store.test_damaged_index import copied, data_of, fill, set_data

N_INDEXES = 500


def open_and_save(directory: Path) -> None:
    """Do what a proxy does with a store."""

    async def work() -> None:
        with opened(directory) as store:
            told = store.report.get("index_made_anew", "")
            await store.commit(*new_state(store, run_of(700)))
            print(len(store) - 1, told)

    asyncio.run(work())


def damaged(whole: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield damaged copies of a store, with what is wrong with each."""
    data = data_of(whole)
    cut = list(truncated(data))
    n_left = N_INDEXES - 2 - len(cut)
    changed = chain(flipped(data, n_left * 3 // 4, 1), scribbled(data, n_left, 1))
    kinds = [*cut, *islice(changed, n_left)]
    for number, (what, content) in enumerate(kinds):
        directory = copied(whole, folder / str(number))
        set_data(directory, content)
        if number % 2:
            leave_unsealed(directory)
        yield what, directory
    for damage in (put_bad_record, put_unreadable):
        directory = copied(whole, folder / damage.__name__)
        damage(directory)
        yield damage.__name__.replace("_", " "), directory


def run(work: Callable[[], object]) -> tuple[str, str]:
    """Return how a process ended that did *work*, in a word, and what it said."""
    with tempfile.TemporaryFile() as said:
        if (pid := os.fork()) == 0:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            sys.stdout = sys.stderr = open(1, "w", closefd=False)  # noqa: SIM115 - until it ends
            status = 0
            try:
                work()
            except SystemExit as end:
                status = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
                status = 99
            sys.stdout.flush()
            os._exit(status)
        _, ended = os.waitpid(pid, 0)
        said.seek(0)
        words = said.read().decode(errors="replace")
    if os.WIFSIGNALED(ended):
        return f"signal {os.WTERMSIG(ended)}", words
    status = os.WEXITSTATUS(ended)
    return ("traceback" if "Traceback" in words else f"status {status}"), words


def work_on(directory: Path) -> list[tuple[str, str, str]]:
    """Return what each process did with a damaged index, as (process, end, words)."""
    other = directory.with_name(directory.name + " opened")
    shutil.copytree(directory, other, copy_function=os.link)
    set_data_of_its_own(directory, other)

    def command(*arguments: str) -> tuple[str, str]:
        return run(lambda: proxy_main([*arguments, "--slot-save-path", str(directory)]))

    return [
        ("ls", *command("ls")),
        ("check", *command("check")),
        ("check --fix", *command("check", "--fix")),
        ("check again", *command("check")),
        ("opened", *run(lambda: open_and_save(other))),
    ]


def set_data_of_its_own(directory: Path, other: Path) -> None:
    content = data_of(directory)
    (other / "index" / "data.mdb").unlink()
    set_data(other, content)


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="damaged-"))
    whole = folder / "whole"
    whole.mkdir()
    asyncio.run(fill(whole))
    ends: Counter[tuple[str, str]] = Counter()
    lost: Counter[int] = Counter()
    stores = list(damaged(whole, folder))
    for what, directory in stores:
        for process, end, said in work_on(directory):
            ends[process, end] += 1
            if end not in ("status 0", "status 1") or (end, process) == ("status 1", "opened"):
                print(f"{what} ({directory.name}): {process}: {end}: {said.strip()[-300:]}")
            if process == "opened" and end == "status 0":
                lost[4 - int(said.split()[0])] += 1
    shutil.rmtree(folder)
    print(f"{len(stores)} damaged indexes\n")
    for (process, end), n_times in sorted(ends.items()):
        print(f"{process:12} {end:12} {n_times:4}")
    print("states lost of 4:", ", ".join(f"{n} in {times}" for n, times in sorted(lost.items())))


def cost(n_checkpoints: int, n_tokens: int = 5000) -> None:
    """Print what looking at an index costs, closed and not."""
    folder = Path(tempfile.mkdtemp(prefix="cost-"))
    path, chance = folder / "index", random.Random(1)
    namespace, index = Namespace(b"n" * 16), Index(folder / "index")

    def entries() -> Iterator[tuple[Checkpoint, TokenIds, list[PrefixHash]]]:
        shared = [token_ids(chance.choices(range(99999), k=n_tokens)) for _ in range(50)]
        for number in range(n_checkpoints):
            tokens = shared[number % 50][: chance.randrange(n_tokens // 2)]
            tokens += token_ids(chance.choices(range(99999), k=n_tokens - len(tokens)))
            name = f"lpc-{number:016x}.state"
            record = Checkpoint(
                *(CheckpointId(number), namespace, CheckpointKind.BRANCH, n_tokens, (), False),
                *(name, 1 << 28, 0.0, 0.0),
            )
            yield record, tokens, hash_prefixes(namespace, tokens)

    remaining = entries()
    while batch := list(islice(remaining, 200)):
        index.put(*batch)
    data, copy = path / "data.mdb", path / "data.new"
    seconds = {"close, with its checksum": timed(index.close)}
    seconds["look at a closed one"] = timed(lambda: sound_file(path, copy))
    index = Index(path)
    seconds["read and count all records"] = timed(index.inconsistency)
    index.close()
    seal_of(data).unlink()
    seconds["copy one left by kill -9"] = timed(lambda: sound_file(path, copy))
    index = Index(path)
    seconds["compare all its records"] = timed(index.inconsistency)
    index.close()
    print(
        f"{n_checkpoints:,} checkpoints of {n_tokens:,} tokens, {data.stat().st_size / 1e6:,.0f} MB"
    )
    for what, n_seconds in seconds.items():
        print(f"{what:28} {n_seconds * 1000:8.0f} ms")
    shutil.rmtree(folder)


def timed(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


if __name__ == "__main__":
    if sys.argv[1:2] == ["cost"]:
        cost(int(sys.argv[2]))
    else:
        main()
