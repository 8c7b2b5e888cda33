"""What restoring brings on this server: prompts of some lengths evaluated cold, hot and restored."""

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from proxy.doctor.examination import Note, reach
from proxy.doctor.facts import LlamaServerFacts
from proxy.doctor.probes import Scratch, scratch
from proxy.errors import CacheFault, SaveRejected
from proxy.llama.client import LlamaServer
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


class Measured(msgspec.Struct, frozen=True):
    """What was measured on which model; lengths that do not fit into a slot are left out."""

    build: str
    model: str
    n_ctx: int
    gains: list[Gain]
    left_out: list[int]


async def measure(
    root: LlamaServer, directory: Path, lengths: Sequence[int], note: Note, model: str = ""
) -> Measured:
    """Measure each length in an empty slot, which is left empty; *model* is loaded if *root* is a host.

    Raises CacheFault or OSError.
    """
    with keep_proxies_out(directory):
        upstreams, host = await reach(root, model, may_load=True, note=note)
        if host and (host.problem or len(upstreams) != 1):
            names = ", ".join(flags.model for flags in host.models)
            raise CacheFault(f"{host.name}: {host.problem or f'give one of {names} by --model'}")
        upstream = upstreams[0]
        props = await upstream.props()
        n_ctx = props.n_ctx
        fitting = [n for n in lengths if n + _N_KEPT <= n_ctx]
        async with scratch(upstream, directory) as probing:
            facts = LlamaServerFacts(url=upstream.target.base_url, n_slots=props.total_slots)
            await probing.find_empty_slots(facts)
            if not facts.n_empty:
                unusable = "states cannot be saved and read here: doctor says why"
                busy = "no slot is empty: restart llama-server, or erase one that you can spare"
                raise SaveRejected(unusable if facts.probe_problem else busy)
            server = probing.server
            server.n_vocab = (await server.model_meta()).n_vocab
            # The first evaluation is always slower.
            await server.evaluate(server.empty[0], server.text(3, _N_KEPT))
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
        return round(time.monotonic() - began, 4), timings.cache_n

    cold_seconds, _ = await seconds_of(n_tokens)
    hot_seconds, _ = await seconds_of(n_tokens + _N_MORE)
    async with probing.saver.saved(slot_id) as saved:
        await server.erase(slot_id)
        await server.restore(slot_id, saved.file_name)
        evaluate_seconds, n_reused = await seconds_of(n_tokens + 2 * _N_MORE)
    n_bytes, restore_seconds = server.restores[-1]
    return Gain(
        n_tokens=n_tokens,
        cold_seconds=cold_seconds,
        hot_seconds=hot_seconds,
        restored_seconds=round(restore_seconds + evaluate_seconds, 4),
        restore_seconds=round(restore_seconds, 4),
        save_seconds=round(saved.seconds, 4),
        size_bytes=n_bytes,
        n_reused=n_reused,
    )
