"""Finds out what a saved state of this model is good for, what it costs, and which checkpoints fit it."""

import time

from proxy.core.namespace import choose_namespace, is_same_canary
from proxy.core.prefix import Namespace
from proxy.core.probes import SelfTestResult
from proxy.doctor.bench import Bench
from proxy.doctor.facts import CostFacts, MemoryFacts, StateFacts, StoreFacts
from proxy.driver.contact.identity import (
    Identity,
    Layout,
    canary_tokens,
    read_identity,
    static_key,
    tenant_namespace,
)
from proxy.driver.contact.known_models import (
    NAMESPACES_PREFIX,
    known_namespaces,
    known_tenants,
)
from proxy.driver.contact.memory import self_test_name
from proxy.driver.contact.self_test import SelfTest
from proxy.errors import SaveRejected
from proxy.store.inspection import IndexContent
from proxy.upstream.replies import Props
from proxy.upstream.state_file import SUPPORTED_VERSIONS, StateFile

Canary = list[tuple[int, float]]
_COST_TOKENS = 1100
"""Of the shorter state; the other one is twice as long. Longer than most sliding windows."""


class Model:
    """The model that runs now, as its canary and a probe save show it."""

    def __init__(self, identity: Identity, canary: Canary, state: StateFile) -> None:
        layout: Layout = (state.version, state.layout)
        self.static = static_key(identity, layout)
        self.identity = identity
        self.canary = canary
        self.state = state

    @property
    def facts(self) -> StateFacts:
        """What another llama-server's must be like for states to fit both."""
        identity, state = self.identity, self.state
        return StateFacts(
            model=identity.model,
            is_model_read=" " not in identity.model,
            numbers=(identity.n_vocab, identity.n_params, identity.size_bytes),
            adapters=identity.adapters,
            layout=repr((state.version, state.layout)),
            canary=tuple(self.canary),
        )

    def namespace(self, index: IndexContent) -> Namespace | None:
        """Return the namespace of this model's states, if the index knows it."""
        chosen = choose_namespace(known_namespaces(index, self.static), self.canary)
        return Namespace(chosen.id) if chosen else None


async def identify_model(bench: Bench, props: Props) -> Model:
    """Ask the model for its canary, and save that; raises UpstreamFault or SaveRejected."""
    identity = await read_identity(bench.upstream, props)
    bench.n_vocab = identity.n_vocab
    tokens, _ = canary_tokens(identity)
    slot_id = bench.empty[0]
    bench.used.add(slot_id)
    canary = await bench.upstream.canary(slot_id, tokens)
    async with bench.saver.saved(slot_id) as saved:
        state = saved.state
    await bench.erase()
    if state.tokens[: len(tokens)] != tokens:
        raise SaveRejected("a slot did not hold what was evaluated in it: somebody else uses it")
    return Model(identity, canary, state)


def examine_store(index: IndexContent, model: Model) -> StoreFacts:
    """Return which of the checkpoints are of *model*."""
    namespace = model.namespace(index)
    usable = []
    if namespace is not None:
        tenants = {b"", *known_tenants(index, namespace)}
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
        for known in known_namespaces(index, name.removeprefix(NAMESPACES_PREFIX))
    )


async def examine_memory(
    bench: Bench, model: Model, index: IndexContent, build: str, n_ctx: int
) -> MemoryFacts:
    """Run the self-test, and look up what the index remembers of an earlier one; raises CacheFault."""
    first, *others = bench.empty
    bench.used.add(first)
    test = SelfTest(bench.upstream, bench.probe_save, bench.n_vocab)
    rule = await test.learn_rule(first, n_ctx)
    restores_beside = None
    if others and rule.can_restore:
        bench.used.add(others[0])
        restores_beside, _ = await test.try_beside(first, others[0])
    await bench.erase()
    namespace = model.namespace(index)
    saves_points = bool(model.state.restore_points)
    name = self_test_name(namespace, build, saves_context_checkpoints=saves_points)
    remembered = index.value(name, SelfTestResult) if namespace else None
    sections = model.state.layout or ()
    return MemoryFacts(
        file_version=model.state.version,
        is_version_supported=model.state.version in SUPPORTED_VERSIONS,
        sections=tuple(section.kind for section in sections),
        rule=rule,
        restores_beside=restores_beside,
        remembered_rule=remembered.rule if remembered else None,
    )


async def examine_cost(bench: Bench, n_ctx: int) -> CostFacts:
    """Save two lengths and restore the longer one; raises UpstreamFault or SaveRejected."""
    slot_id, n_short = bench.empty[0], max(1, min(_COST_TOKENS, n_ctx // 4))
    text = bench.text(8, 2 * n_short)
    await bench.evaluate(slot_id, text[:n_short])
    async with bench.saver.saved(slot_id) as saved:
        shorter = saved.state
    timings = await bench.upstream.evaluate(slot_id, text)
    async with bench.saver.saved(slot_id) as saved:
        began = time.monotonic()
        await bench.upstream.restore(slot_id, saved.file_name)
        restore_seconds = time.monotonic() - began
    await bench.erase()
    longer = saved.state
    bytes_per_token = max(0, longer.state_end - shorter.state_end) / n_short
    n_points = len(longer.restore_points)
    return CostFacts(
        fixed_bytes=max(0, round(shorter.state_end - bytes_per_token * n_short)),
        bytes_per_token=bytes_per_token,
        context_checkpoint_bytes=(longer.size_bytes - longer.state_end) // max(1, n_points),
        save_bytes_per_second=saved.n_written / max(1e-6, saved.seconds),
        restore_bytes_per_second=saved.n_written / max(1e-6, restore_seconds),
        evaluate_tokens_per_second=timings.prompt_n / max(1e-3, timings.prompt_ms) * 1000,
    )
