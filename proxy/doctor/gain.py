"""What restoring brings on this server: prompts of some lengths evaluated cold, hot and restored."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from proxy.doctor.examination import Note
from proxy.doctor.probes import Scratch, scratch
from proxy.doctor.survey import Reached, reach
from proxy.errors import CacheFault, SaveRejected
from proxy.llama.client import LlamaServer
from proxy.serving.saver import keep_as_saved
from proxy.store.catalogue import Limits
from proxy.store.directory import keep_proxies_out

_N_KEPT = 64
"""Tokens of the context that are left for what comes behind a prompt."""
_N_MORE = 8


class Gain(msgspec.Struct, frozen=True):
    """One length of prompt: the seconds until its last token is evaluated, in three ways.

    Hot and restored, the prompt goes on from what was there by a few tokens. `n_reused` is what
    llama-server says it reused after the restore: near 0 where restored states are good for nothing.
    """

    n_tokens: int
    cold_seconds: float
    hot_seconds: float
    restored_seconds: float
    restore_seconds: float
    save_seconds: float
    size_bytes: int
    n_reused: int

    @property
    def is_reused(self) -> bool:
        return self.n_reused >= self.n_tokens

    @property
    def factor(self) -> float:
        """How many times sooner a restored prompt is ready than one that is evaluated."""
        return self.cold_seconds / max(1e-6, self.restored_seconds)


class NotOneModel(CacheFault):
    """A host has other models loaded than the one to be measured; the message says what to do."""


class Measured(msgspec.Struct, frozen=True):
    """What was measured on which model; lengths that do not fit into a slot are left out.

    At a host, `loaded` is the model that was loaded for this, and `unloaded` are those that had to go.
    """

    build: str
    model: str
    n_ctx: int
    gains: list[Gain]
    left_out: list[int]
    loaded: str = ""
    unloaded: tuple[str, ...] = ()


async def measure(
    root: LlamaServer, directory: Path, lengths: Sequence[int], note: Note, model: str = ""
) -> Measured:
    """Measure each length in an empty slot, which is left empty; *model* is loaded if *root* is a host.

    Raises CacheFault or OSError.
    """
    with keep_proxies_out(directory):
        reached = await reach(root, model, may_load=True, note=note)
        measured = await _measure_all(_only(reached, model), directory, lengths, note)
    if reached.host is None:
        return measured
    return msgspec.structs.replace(
        measured, loaded=reached.host.loaded, unloaded=reached.host.unloaded
    )


def _only(reached: Reached, model: str) -> LlamaServer:
    host = reached.host
    if len(reached.upstreams) == 1 and (host is not None or not model):
        return reached.upstreams[0]
    if host is None:
        raise NotOneModel("there is one model at this address: leave --model out")
    if host.problem:
        raise NotOneModel(f"{host.name}: {host.problem}")
    names = ", ".join(flags.model for flags in host.models)
    if model:
        raise NotOneModel(f"{host.name} has no model {model}: give one of {names}")
    n_loaded = f"{len(reached.upstreams)} models loaded" if reached.upstreams else "no model loaded"
    raise NotOneModel(f"{host.name} has {n_loaded}: say which to measure by --model, of {names}")


async def _measure_all(
    upstream: LlamaServer, directory: Path, lengths: Sequence[int], note: Note
) -> Measured:
    props = await upstream.props()
    n_ctx = props.n_ctx
    fitting = [n for n in lengths if n + _N_KEPT <= n_ctx]
    async with scratch(upstream, directory, Limits(sys.maxsize), keep_as_saved) as probing:
        server = probing.server
        await probing.find_empty_slots(props.total_slots)
        if not probing.can_save:
            raise SaveRejected("states cannot be saved and read here: doctor says why")
        if not server.empty:
            raise SaveRejected(
                "no slot is empty: restart llama-server, or erase one that you can spare"
            )
        server.n_vocab = (await server.model_meta()).n_vocab
        await server.evaluate(
            server.empty[0], server.text(3, _N_KEPT)
        )  # the first is always slower
        gains = []
        for n_tokens in fitting:
            note(f"measuring {n_tokens:,} tokens")
            gains.append(await _measure(probing, n_tokens))
    left_out = [n for n in lengths if n not in fitting]
    return Measured(props.build_info, props.model_path, n_ctx, gains, left_out)


async def _measure(probing: Scratch, n_tokens: int) -> Gain:
    server, slot_id = probing.server, probing.server.empty[0]
    text = server.text(n_tokens, n_tokens + 2 * _N_MORE)
    await server.erase(slot_id)

    async def seconds_of(n: int) -> tuple[float, int]:
        began = time.monotonic()
        timings = await server.evaluate(slot_id, text[:n])
        return time.monotonic() - began, timings.cache_n

    cold_seconds, _ = await seconds_of(n_tokens)
    hot_seconds, _ = await seconds_of(n_tokens + _N_MORE)
    async with probing.saver.saved(slot_id) as saved:
        await server.erase(slot_id)
        began = time.monotonic()
        await server.restore(slot_id, saved.file_name)
        restore_seconds = time.monotonic() - began
        evaluate_seconds, n_reused = await seconds_of(n_tokens + 2 * _N_MORE)
    return Gain(
        n_tokens=n_tokens,
        cold_seconds=round(cold_seconds, 4),
        hot_seconds=round(hot_seconds, 4),
        restored_seconds=round(restore_seconds + evaluate_seconds, 4),
        restore_seconds=round(restore_seconds, 4),
        save_seconds=round(saved.seconds, 4),
        size_bytes=saved.n_written,
        n_reused=n_reused,
    )
