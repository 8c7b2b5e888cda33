"""What the proxy knows about a llama-server process and its model, and what the index keeps of that."""

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import msgspec
import xxhash
from cachetools import LRUCache

from proxy.core.conditions import DegradationKind
from proxy.core.model import CANARY_TOKENS, NO_RULE, Prompt, Rule, RuleKind, tenant_namespace
from proxy.core.rates import Rates
from proxy.core.rule import SelfTestResult, usable_tokens
from proxy.core.saving import StateSize, expected_bytes, extent_of
from proxy.core.slots import Content, has_dropped_points, n_believed_points
from proxy.core.tokens import Namespace, TokenIds, token_ids
from proxy.errors import CacheFault, NoRoom, UpstreamUnreachable
from proxy.health import CannotCache, Degradations
from proxy.llama.client import LlamaServer, Props, Timings
from proxy.llama.model_file import fingerprint_model
from proxy.llama.state_file import Section
from proxy.serving.desk import LeaseDesk
from proxy.store.known_models import asking_name, known_tenants, tenants_name
from proxy.store.store import CheckpointStore

# What can be said of a model without evaluating anything.
#
# Owns: the static half of a namespace (the other half is the canary).


Layout = tuple[int, tuple[Section, ...] | None]
"""Slot file version and the sections of a state file, as a probe save showed them."""


class ModelIdentity(msgspec.Struct, frozen=True):
    """A model with its adapters, as llama-server and the model file tell it."""

    model: str
    n_vocab: int
    n_params: int
    size_bytes: int
    modalities: dict[str, object]
    adapters: tuple[tuple[int, str, float], ...]


async def read_identity(upstream: LlamaServer, props: Props) -> ModelIdentity:
    """Ask llama-server for its model and read the file if it is readable; raises UpstreamFault."""
    meta = await upstream.model_meta()
    adapters = await upstream.lora_adapters()
    path = Path(props.model_path)
    fingerprint = await asyncio.to_thread(fingerprint_model, path)
    return ModelIdentity(
        model=fingerprint or f"{path} {meta.size}",
        n_vocab=meta.n_vocab,
        n_params=meta.n_params,
        size_bytes=meta.size,
        modalities=props.modalities,
        adapters=tuple((a.id, a.path, a.scale) for a in adapters),
    )


def canary_tokens(identity: ModelIdentity) -> tuple[TokenIds, TokenIds]:
    """Return the canary's tokens, and the one that is evaluated in another slot."""
    fixed = token_ids(token % max(1, identity.n_vocab) for token in CANARY_TOKENS)
    return fixed[:-1], fixed[-1:]


def static_key(identity: ModelIdentity, layout: Layout) -> str:
    """Return the key under which the namespaces of a model and a cache layout are known."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode([identity, layout]))


# What the proxy knows about the llama-server process it is attached to.


_MAX_SIZES = 256
_MAX_KEYS = 1024


@dataclass
class Attachment:
    """One llama-server process, from first contact until it is gone.

    `model_namespace` is None where nothing may be saved or restored; `obstacle` then says why.
    `rule` is not known until the self-test has spoken; `n_contradictions` restores have not been reused
    as it says since. `disabled_shapes` are kinds of requests whose tokens the proxy predicted wrongly.
    The newest `n_believed_points` context checkpoints of a live slot are counted on.
    `asks_for_key` says that llama-server refuses requests without an API key, `accepted_keys` are digests
    of those that this process has taken. `is_one_tenant` says that keys make no difference to reuse.
    `unsupported_paths` are routes that llama-server has answered 501.
    `clears_idle_slots` is None where that could not be told: whether a slot that starts empties idle ones.
    `saves_context_checkpoints` says what the probe save showed: it depends on flags that llama-server
    does not tell, and so does the rule.
    `sizes` are those of the states that it has saved lately.
    """

    process_id: str
    build: str
    desk: LeaseDesk
    n_ctx: int
    degradations: Degradations
    n_believed_points: int = 10
    obstacle: CannotCache | None = None
    model_namespace: Namespace | None = None
    saves_context_checkpoints: bool = False
    clears_idle_slots: bool | None = None
    rule: Rule = NO_RULE
    self_test: SelfTestResult | None = None
    rates: Rates = field(default_factory=Rates)
    disabled_shapes: set[str] = field(default_factory=set)
    asks_for_key: bool = True
    is_one_tenant: bool = False
    accepted_keys: LRUCache[bytes, bool] = field(default_factory=lambda: LRUCache(_MAX_KEYS))
    unsupported_paths: set[str] = field(default_factory=set)
    tenants: set[bytes] = field(default_factory=set)
    n_contradictions: int = 0
    n_contradictions_allowed: int = 2
    _is_examined: asyncio.Event = field(default_factory=asyncio.Event)
    sizes: deque[StateSize] = field(default_factory=lambda: deque(maxlen=_MAX_SIZES))

    async def examination(self, seconds: float | None) -> None:
        """Wait until it is known what restores are good for here, at most so long if a limit is given."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._is_examined.wait()

    def note_examined(self) -> None:
        """Note that nothing more will be known soon."""
        self._is_examined.set()

    @property
    def can_cache(self) -> bool:
        return self.model_namespace is not None

    @property
    def is_caching(self) -> bool:
        return self.can_cache and self.rule.can_restore

    def degrade(self, kind: DegradationKind, detail: str = "") -> None:
        """Note that something is wrong with this llama-server, unless it is gone already."""
        if not self.desk.is_closed:
            self.degradations.begin(kind, detail)

    def recover(self, *kinds: DegradationKind) -> None:
        """Note that it is mended."""
        if not self.desk.is_closed:
            self.degradations.end(*kinds)

    @contextmanager
    def watching(self, kind: DegradationKind, *faults: type[CacheFault]) -> Iterator[None]:
        """Begin a degradation if one of *faults* leaves the block, end it if none does.

        For want of room nothing has failed: NoRoom counts only where it is named.
        """
        try:
            yield
        except faults as fault:
            if not isinstance(fault, NoRoom) or NoRoom in faults:
                self.degrade(kind, str(fault))
            raise
        self.recover(kind)

    def note_saved_points(self, believed: Sequence[int], saved: Sequence[int]) -> None:
        """Learn from a save how many context checkpoints llama-server keeps in a slot."""
        n_sure = max(1, n_believed_points(len(saved)))
        if n_sure > self.n_believed_points or has_dropped_points(believed, saved):
            self.n_believed_points = n_sure

    def note_missing_point(self, believed: Sequence[int], point: int) -> None:
        """Learn that a slot had dropped a context checkpoint, and so all that are older."""
        n_newer = sum(newer > point for newer in believed)
        if n_newer and self.rule.kind is RuleKind.RESTORE_POINTS:
            self.n_believed_points = min(self.n_believed_points, n_newer)

    def disable_shape(self, shape: str) -> None:
        """Serve requests of this shape uncached: their tokens were predicted wrongly."""
        self.disabled_shapes.add(shape)
        self.degrade(DegradationKind.TOKENIZED_OTHERWISE, f"last: {shape}")

    def note_tenants(self) -> None:
        """Look whether several keys are in use: llama-server's RAM cache does not tell them apart."""
        if self.asks_for_key and len(self.tenants - {b""}) > 1:
            self.degrade(DegradationKind.SEVERAL_API_KEYS)

    def note_clearing(self, *, clears: bool | None) -> None:
        """Note whether a slot that starts empties idle ones, if that is known."""
        if clears is None:
            return
        self.clears_idle_slots = clears
        if clears:
            self.degrade(DegradationKind.IDLE_SLOTS_CLEARED)
        else:
            self.recover(DegradationKind.IDLE_SLOTS_CLEARED)

    @property
    def stride_tokens(self) -> int:
        """How far a new context checkpoint must lie behind the last one of its slot."""
        return self.rule.stride_tokens if self.rule.kind is RuleKind.END_ONLY else 1

    def fail_self_test(self, detail: str) -> None:
        """Note that the rule could not be measured; nothing is restored without one."""
        self.rule = NO_RULE
        self.note_examined()
        self.degrade(DegradationKind.SELF_TEST_FAILED, detail)
        self.recover(DegradationKind.SELF_TEST_PENDING)

    def set_rule(self, rule: Rule) -> None:
        """Go by *rule* from now on: it was measured on this model and build."""
        self.rule = rule
        self.note_examined()
        if not rule.can_restore:
            self.degrade(DegradationKind.RULE_IS_NOTHING)
        else:
            self.recover(DegradationKind.RULE_IS_NOTHING)
        self.recover(
            DegradationKind.SELF_TEST_PENDING,
            DegradationKind.SELF_TEST_FAILED,
            DegradationKind.RESTORES_NOT_REUSED,
        )

    def require_same_process(self) -> None:
        """Raise UpstreamUnreachable if llama-server was replaced since."""
        if self.desk.is_closed:
            raise UpstreamUnreachable("llama-server was replaced meanwhile")

    def learn_evaluation(self, timings: Timings) -> None:
        """Note how long an evaluation took, as llama-server says."""
        n_from, n_to = timings.cache_n, timings.cache_n + timings.prompt_n
        self.rates = self.rates.after_evaluation(n_from, n_to, timings.prompt_ms / 1000)

    def bytes_of(self, n_tokens: int) -> int:
        """Return how large the state of a prompt's first *n_tokens* will be at most; 0 if unknown."""
        return expected_bytes(self.sizes, n_tokens, 2) or 0

    def state_bytes(self, content: Content) -> int:
        """Return how large the state of a slot will be at most; 0 while nothing like it was saved."""
        extent = extent_of(content)
        return (expected_bytes(self.sizes, *extent) or 0) if extent else 0

    def tenant_namespace(self, tenant: bytes) -> Namespace:
        """Return the namespace of one tenant of this model, of all if they are one."""
        return tenant_namespace(self.model_namespace, b"" if self.is_one_tenant else tenant)


# What the index remembers of a model from one process to the next.
#
# Its self-test, tenants, sizes and rates.


_MAX_OTHERS = 16
"""Of so many other tenants it is looked whether they have what a request missed."""


def owner_of(store: CheckpointStore, attachment: Attachment, tokens: TokenIds) -> Namespace | None:
    """Return the namespace of the tenant whose tokens a slot holds; None if that is not known.

    llama-server does not say. With one tenant there is no question; with several it is the one of whom
    the store has the longest beginning of the same tokens.
    """
    namespaces = [attachment.tenant_namespace(t) for t in attachment.tenants or {b""}]
    if len(namespaces) == 1:
        return namespaces[0]
    known = [(max((c.n_common for c in store.find(n, tokens)), default=0), n) for n in namespaces]
    n_common, namespace = max(known)
    return namespace if 2 * n_common >= len(tokens) else None


async def remember_tenant(store: CheckpointStore, attachment: Attachment, tenant: bytes) -> None:
    attachment.tenants.add(tenant)
    await store.put_value(tenants_name(attachment.model_namespace), sorted(attachment.tenants))


async def remember_asking(store: CheckpointStore, attachment: Attachment) -> None:
    """Remember that llama-server has asked for keys, so that it knew whose this model's states are."""
    name = asking_name(attachment.model_namespace)
    if attachment.asks_for_key and not store.index.value(name, bool):
        await store.put_value(name, True)


async def unite_tenants(store: CheckpointStore, attachment: Attachment, *, are_all: bool) -> int:
    """Give the states of all tenants of a model to the one that there is now; return how many.

    Unless they *are_all* one by the operator's word, those that came with a key which llama-server has
    asked for stay with that key: who does not ask any more has not said that everybody may see them.
    """
    model = attachment.model_namespace
    tenants = known_tenants(store.index, model)
    if not tenants or (store.index.value(asking_name(model), bool) and not are_all):
        return 0
    ours = attachment.tenant_namespace(b"")
    theirs = {tenant_namespace(model, tenant) for tenant in tenants} - {ours}
    moving = [c for c in store if c.namespace in theirs]
    for checkpoint in moving:
        await store.move(checkpoint, ours)
    await store.put_value(tenants_name(model), [])
    return len(moving)


def known_to_others(store: CheckpointStore, attachment: Attachment, prompt: Prompt) -> int:
    """Return how many tokens of a prompt the states of other tenants of the model would give."""
    model, rule = attachment.model_namespace, attachment.rule
    tenants = {b"", *known_tenants(store.index, model)}
    others = {tenant_namespace(model, tenant) for tenant in tenants} - {prompt.namespace}
    found = (f for n in islice(others, _MAX_OTHERS) for f in store.find(n, prompt.tokens))
    usable = (usable_tokens(rule, f.checkpoint, f.n_common, prompt.n_tokens) for f in found)
    return max(usable, default=0)


def known_self_test(store: CheckpointStore, attachment: Attachment) -> SelfTestResult | None:
    """Return what a self-test of this model on this build has found before.

    One of a server that saved context checkpoints is not that of one which does not: --swa-full and
    --ctx-checkpoints decide that on the same build.
    """
    return store.index.value(_self_test_name_of(attachment), SelfTestResult)


async def remember_self_test(
    store: CheckpointStore, attachment: Attachment, result: SelfTestResult | None
) -> None:
    """Remember what a self-test has found, or with None that nothing is known."""
    await store.put_value(_self_test_name_of(attachment), result)


def self_test_name(
    model_namespace: Namespace | None, build: str, *, saves_context_checkpoints: bool
) -> str:
    points = "with" if saves_context_checkpoints else "without"
    return f"self-test {(model_namespace or b'').hex()} {points} context checkpoints {build}"


def _self_test_name_of(attachment: Attachment) -> str:
    return self_test_name(
        attachment.model_namespace,
        attachment.build,
        saves_context_checkpoints=attachment.saves_context_checkpoints,
    )


def known_sizes(store: CheckpointStore, attachment: Attachment) -> list[StateSize]:
    """Return the sizes of the states that the self-test of this model has saved."""
    return store.index.value(_sizes_name(attachment), list[StateSize]) or []


async def remember_sizes(store: CheckpointStore, attachment: Attachment) -> None:
    await store.put_value(_sizes_name(attachment), list(attachment.sizes))


def _sizes_name(attachment: Attachment) -> str:
    return f"sizes {(attachment.model_namespace or b'').hex()}"


def known_rates(store: CheckpointStore, attachment: Attachment) -> Rates:
    """Return how fast this model on this build was when it was last served here."""
    return store.index.value(_rates_name(attachment), Rates) or Rates()


async def remember_rates(store: CheckpointStore, attachment: Attachment) -> None:
    await store.put_value(_rates_name(attachment), attachment.rates)


def _rates_name(attachment: Attachment) -> str:
    return f"rates {(attachment.model_namespace or b'').hex()} {attachment.build}"
