"""Finds out what a saved state of this model is good for, what it costs, and which checkpoints fit it."""

import asyncio
import time

from proxy.core.model import Rule
from proxy.core.namespace import CANARY_TOKENS, KnownNamespace, choose_namespace, is_same_canary
from proxy.core.prefix import Namespace, token_ids
from proxy.doctor.bench import Bench
from proxy.doctor.facts import CostFacts, MemoryFacts, StoreFacts
from proxy.driver.identity import Layout, read_identity, static_key, tenant_namespace
from proxy.driver.memory import NAMESPACES_PREFIX, namespaces_name, rule_name, tenants_name
from proxy.driver.self_test import SelfTest
from proxy.errors import SaveRejected
from proxy.store.inspection import IndexContent
from proxy.upstream.replies import Props
from proxy.upstream.state_file import SUPPORTED_VERSIONS, StateFile

Canary = list[tuple[int, float]]
_COST_TOKENS = 1100
"""Of the shorter state; the other one is twice as long. Longer than most sliding windows."""


class Model:
    """The model that runs now, as its canary and a probe save show it."""

    def __init__(self, static: str, canary: Canary, state: StateFile) -> None:
        self.static = static
        self.canary = canary
        self.state = state

    def namespace(self, index: IndexContent) -> Namespace | None:
        """Return the namespace of this model's states, if the index knows it."""
        known = index.value(namespaces_name(self.static), list[KnownNamespace]) or []
        chosen = choose_namespace(known, self.canary)
        return Namespace(chosen.id) if chosen else None


async def identify_model(bench: Bench, props: Props) -> Model:
    """Ask the model for its canary, and save that; raises UpstreamFault or SaveRejected."""
    identity = await read_identity(bench.upstream, props)
    bench.n_vocab = identity.n_vocab
    tokens = token_ids(token % max(1, identity.n_vocab) for token in CANARY_TOKENS)
    slot_id = bench.empty[0]
    bench.used.add(slot_id)
    canary = await bench.upstream.canary(slot_id, tokens)
    state = (await bench.save(slot_id)).state
    await bench.erase()
    if state.tokens[: len(tokens)] != tokens:
        raise SaveRejected("a slot did not hold what was evaluated in it: somebody else uses it")
    layout: Layout = (state.version, state.layout)
    return Model(static_key(identity, layout), canary, state)


def examine_store(index: IndexContent, model: Model) -> StoreFacts:
    """Return which of the checkpoints are of *model*."""
    namespace = model.namespace(index)
    usable = []
    if namespace is not None:
        tenants = {b"", *(index.value(tenants_name(namespace), list[bytes]) or [])}
        ours = {tenant_namespace(namespace, tenant) for tenant in tenants}
        usable = [c for c in index.checkpoints if c.namespace in ours]
    return StoreFacts(
        n_checkpoints=len(index.checkpoints),
        size_bytes=sum(c.size_bytes for c in index.checkpoints),
        n_usable=len(usable),
        usable_bytes=sum(c.size_bytes for c in usable),
        knows_model_otherwise=namespace is None and _knows_canary(index, model.canary),
    )


def _knows_canary(index: IndexContent, canary: Canary) -> bool:
    return any(
        is_same_canary(known.canary, canary)
        for name in index.values
        if name.startswith(NAMESPACES_PREFIX)
        for known in index.value(name, list[KnownNamespace]) or []
    )


async def examine_memory(
    bench: Bench, model: Model, index: IndexContent, build: str, n_ctx: int
) -> MemoryFacts:
    """Run the self-test, and look up what the index remembers of an earlier one.

    Raises UpstreamFault, or OSError if a file cannot be read.
    """
    slot_id = bench.empty[0]
    bench.used.add(slot_id)
    test = SelfTest(bench.upstream, bench.files, slot_id, bench.rewrite)
    rule = await test.run(n_ctx, bench.n_vocab)
    await bench.erase()
    namespace = model.namespace(index)
    remembered = index.value(rule_name(namespace, build), Rule) if namespace else None
    sections = model.state.layout or ()
    return MemoryFacts(
        file_version=model.state.version,
        is_version_supported=model.state.version in SUPPORTED_VERSIONS,
        sections=tuple(section.kind for section in sections),
        rule=rule,
        remembered_rule=remembered,
    )


async def examine_cost(bench: Bench, n_ctx: int) -> CostFacts:
    """Save two lengths and restore the longer one; raises UpstreamFault or SaveRejected."""
    slot_id, n_short = bench.empty[0], max(1, min(_COST_TOKENS, n_ctx // 4))
    text = bench.text(8, 2 * n_short)
    await bench.evaluate(slot_id, text[:n_short])
    shorter = (await bench.save(slot_id)).state
    timings = await bench.upstream.evaluate(slot_id, text)
    saved = await bench.save(slot_id)
    began = time.monotonic()
    await bench.upstream.restore(slot_id, saved.name)
    restore_seconds = time.monotonic() - began
    await asyncio.to_thread(bench.files.remove, saved.name)
    await bench.erase()
    longer = saved.state
    bytes_per_token = max(0, longer.state_end - shorter.state_end) / n_short
    n_points = len(longer.restore_points)
    return CostFacts(
        fixed_bytes=max(0, round(shorter.state_end - bytes_per_token * n_short)),
        bytes_per_token=bytes_per_token,
        context_checkpoint_bytes=(longer.size_bytes - longer.state_end) // max(1, n_points),
        save_bytes_per_second=longer.size_bytes / max(1e-6, saved.save_seconds),
        restore_bytes_per_second=longer.size_bytes / max(1e-6, restore_seconds),
        evaluate_tokens_per_second=timings.prompt_n / max(1e-3, timings.prompt_ms) * 1000,
    )
