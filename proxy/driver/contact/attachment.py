"""What the proxy knows about the llama-server process it is attached to."""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from proxy.core.degradation import DegradationKind
from proxy.core.keeping.state_size import StateSize, expected_bytes, extent_of
from proxy.core.model import NO_RULE, Rule
from proxy.core.prefix import Namespace
from proxy.core.probes import SelfTestResult
from proxy.core.rates import Rates
from proxy.core.slots import Content
from proxy.driver.contact.identity import tenant_namespace
from proxy.driver.degradations import CannotCache, DegradationsHere
from proxy.driver.slots.leases import LeaseDesk
from proxy.errors import CacheFault, NoRoom, UpstreamUnreachable
from proxy.upstream.replies import Timings

_MAX_SIZES = 256


@dataclass
class Attachment:
    """One llama-server process, from first contact until it is gone.

    `model_namespace` is None where nothing may be saved or restored; `obstacle` then says why.
    `rule` is *nothing* until the self-test has spoken; `n_contradictions` restores have not been reused
    as it says since. `disabled_shapes` are kinds of requests whose tokens the proxy predicted wrongly.
    `n_believed_points` context checkpoints of a live slot are counted on, the newest.
    `clears_idle_slots` is None where that could not be told: whether a slot that starts empties idle ones.
    `saves_context_checkpoints` says what the probe save showed: it depends on flags that llama-server
    does not tell, and so does the rule.
    `sizes` are those of the states that it has saved lately.
    """

    process_id: str
    build: str
    desk: LeaseDesk
    n_ctx: int
    degradations: DegradationsHere
    n_believed_points: int = 10
    obstacle: CannotCache | None = None
    model_namespace: Namespace | None = None
    saves_context_checkpoints: bool = False
    clears_idle_slots: bool | None = None
    rule: Rule = NO_RULE
    self_test: SelfTestResult | None = None
    rates: Rates = field(default_factory=Rates)
    disabled_shapes: set[str] = field(default_factory=set)
    tenants: set[bytes] = field(default_factory=set)
    n_contradictions: int = 0
    n_contradictions_allowed: int = 2
    _is_examined: asyncio.Event = field(default_factory=asyncio.Event)
    sizes: deque[StateSize] = field(default_factory=lambda: deque(maxlen=_MAX_SIZES))

    async def examination(self, seconds: float) -> None:
        """Wait until it is known what restores are good for here, at most so long."""
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

    def disable_shape(self, shape: str) -> None:
        """Serve requests of this shape uncached: their tokens were predicted wrongly."""
        self.disabled_shapes.add(shape)
        self.degrade(DegradationKind.TOKENIZED_OTHERWISE, f"last: {shape}")

    def note_tenants(self) -> None:
        """Look whether there are several: llama-server's RAM cache does not tell them apart."""
        if len(self.tenants) > 1:
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

    def fail_self_test(self, detail: str) -> None:
        """Note that the rule could not be measured; nothing is restored without one."""
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
        """Return the namespace of one tenant of this model."""
        return tenant_namespace(self.model_namespace, tenant)
