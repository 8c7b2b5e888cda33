"""A store that is used at random while its directory is recorded, and what a power cut must leave."""

import asyncio
import random
import shutil
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from proxy.core.eviction import Removal
from proxy.core.model import CheckpointId, CheckpointKind, KnownNamespace, tenant_namespace
from proxy.core.tokens import Namespace, TokenIds
from proxy.errors import StoreFault
from proxy.store.known_models import namespaces_name
from proxy.store.store import CheckpointStore
from tests.lab.power_cuts import Cut, Note, Recorder, leave
from tests.store.conftest import branch, found, names_in, new_state, run_of
from tests.unit.state_files import attention, state_file, words

MODEL = Namespace(b"m" * 16)
OWN = tenant_namespace(MODEL, b"")
LIMITS = 64 << 20


@dataclass(frozen=True)
class Promise:
    """What the store has said by some note: these states are there, those may be, and these are gone.

    `pinned` are those of which that was said; `counted` is a value that was put, `counting` the next one.
    """

    n_notes: int
    kept: frozenset[CheckpointId] = frozenset()
    going: frozenset[CheckpointId] = frozenset()
    pinned: frozenset[CheckpointId] = frozenset()
    counted: int = 0
    counting: int = 0


@dataclass
class Story:
    """Uses a store and notes what it promises."""

    directory: Path
    chance: random.Random
    promises: list[Promise] = field(default_factory=lambda: [Promise(0)])
    tokens: dict[CheckpointId, TokenIds] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    async def play(self, n_steps: int) -> None:
        self.directory.mkdir(mode=0o700)
        recorder = Recorder(self.directory, self.notes)
        with recorder.recording():
            store = CheckpointStore(self.directory, LIMITS)
            models = [KnownNamespace(MODEL, [(5, -0.5)], "coder")]
            await store.put_value(namespaces_name("static"), models)
            for _ in range(n_steps):
                store = await self._step(store)
            store.close()
        self._promise()

    def _promise(self, **changes: object) -> None:
        self.promises.append(
            replace(self.promises[-1], n_notes=len(self.notes), **changes)  # type: ignore[arg-type]
        )

    async def _step(self, store: CheckpointStore) -> CheckpointStore:
        last, held = self.promises[-1], sorted(self.promises[-1].kept)
        what = self.chance.choices(("commit", "remove", "pin", "count", "open"), (6, 2, 1, 1, 1))[0]
        if what == "commit" or not held:
            await self._commit(store)
        elif what == "remove":
            going = self.chance.choice(held)
            there = store.get(going)
            assert there is not None
            self._promise(kept=last.kept - {going}, going=last.going | {going})
            await store.remove(there, Removal.OPERATOR)
            self._promise(going=last.going, pinned=last.pinned - {going})
        elif what == "pin":
            pinned = self.chance.choice(held)
            await store.pin(pinned, is_pinned=True)
            self._promise(pinned=last.pinned | {pinned})
        elif what == "count":
            self._promise(counting=last.counted + 1)
            await store.put_value("counted", last.counted + 1)
            self._promise(counted=last.counted + 1)
        else:
            if self.chance.random() < 0.5:
                store.close()
            else:
                abandon(store)
            store = CheckpointStore(self.directory, LIMITS)
        return store

    async def _commit(self, store: CheckpointStore) -> None:
        last, n_tokens = self.promises[-1], self.chance.randrange(300, 3000)
        tokens = self.chance.choice(
            (run_of(n_tokens), branch(200, n_tokens, len(self.tokens) * 4000))
        )
        content = state_file(words(tokens), attention(len(tokens)))
        kind = self.chance.choice(list(CheckpointKind))
        checkpoint, _ = state = new_state(store, tokens, content=content, namespace=OWN, kind=kind)
        self.tokens[checkpoint.id] = tokens
        self._promise(going=last.going | {checkpoint.id})
        await store.commit(*state)
        self._promise(kept=last.kept | {checkpoint.id}, going=last.going)

    def promise_at(self, n_notes: int) -> Promise:
        """Return what had been promised when so many notes had been made."""
        return next(p for p in reversed(self.promises) if p.n_notes <= n_notes)

    def wrongs(self, n_notes: int, cut: Cut, target: Path) -> list[str]:
        """Cut the power after so many notes, open what is left, and return what is wrong with it."""
        leave(self.notes[:n_notes], target, cut, random.Random(f"{n_notes} {cut}"))
        try:
            return asyncio.run(self._look(target, self.promise_at(n_notes)))
        finally:
            shutil.rmtree(target)

    async def _look(self, directory: Path, promise: Promise) -> list[str]:
        wrong = []
        for opening in ("first", "second"):
            try:
                store = CheckpointStore(directory, LIMITS)
            except Exception as error:
                return [f"does not open: {error!r}"]
            try:
                wrong += [f"{opening} opening: {w}" async for w in self._judge(store, promise)]
                removed = [store.report[f"n_{kind}"] for kind in _REMOVED]
                if opening == "second" and removed != [0, 0]:
                    wrong.append(f"the second opening removes {removed}")
            finally:
                store.close()
        return wrong

    async def _judge(self, store: CheckpointStore, promise: Promise):  # type: ignore[no-untyped-def]
        there = {checkpoint.id: checkpoint for checkpoint in store}
        if lost := promise.kept - there.keys():
            yield f"{len(lost)} states are lost"
        if strange := there.keys() - promise.kept - promise.going:
            yield f"{len(strange)} states are back that were removed"
        if names_in(store.files.directory) != {c.file_name for c in there.values()}:
            yield "files without entries"
        if (counted := store.index.value("counted", int) or 0) not in (
            promise.counted,
            promise.counting,
        ):
            yield f"a value is {counted} instead of {promise.counted}"
        if not all(there[i].is_pinned for i in promise.pinned & there.keys()):
            yield "a pin is lost"
        for checkpoint in there.values():
            tokens = self.tokens[checkpoint.id]
            if checkpoint.id not in {
                c.checkpoint.id for c in found(store, tokens, checkpoint.namespace)
            }:
                yield "a state is not found by its prompt"
            with suppress(StoreFault):
                async with store.using(checkpoint):
                    expected = state_file(words(tokens), attention(len(tokens)))
                    if store.files.path(checkpoint.file_name).read_bytes() != expected:
                        yield "a wrong state would be restored"
                    continue
            yield "a damaged state was committed"


_REMOVED = ("entries_without_file", "files_without_entry")


def abandon(store: CheckpointStore) -> None:
    """Let go of a store as a dying process does: nothing more is written."""
    store._writer.shutdown()
    store.index._env.close()
    store._directory._opened.pop_all()  # frees the lock, seals nothing
