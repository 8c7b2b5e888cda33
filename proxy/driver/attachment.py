"""What the proxy knows about the llama-server process it is attached to."""

from collections import deque
from dataclasses import dataclass, field, replace

import xxhash

from proxy.core.model import NO_RULE, Rates, Rule
from proxy.core.prefix import Namespace
from proxy.core.state_size import StateSize
from proxy.driver.leases import LeaseDesk

_MAX_SIZES = 256


@dataclass
class Attachment:
    """One llama-server process, from first contact until it is gone.

    `model_namespace` is None where nothing may be saved or restored; `reasons` then says why.
    `rule` is *nothing* until the self-test has spoken. `disabled_shapes` are kinds of requests whose
    tokens the proxy predicted wrongly. `sizes` are those of the states that it has saved lately.
    """

    process_id: str
    desk: LeaseDesk
    n_ctx: int
    model_namespace: Namespace | None = None
    rule: Rule = NO_RULE
    rates: Rates = field(default_factory=Rates)
    reasons: list[str] = field(default_factory=list)
    disabled_shapes: set[str] = field(default_factory=set)
    tenants: set[bytes] = field(default_factory=set)
    sizes: deque[StateSize] = field(default_factory=lambda: deque(maxlen=_MAX_SIZES))

    @property
    def can_cache(self) -> bool:
        return self.model_namespace is not None

    def learn(self, **measured: float) -> None:
        """Move the named rates halfway towards what was just measured."""
        moved = {name: (getattr(self.rates, name) + value) / 2 for name, value in measured.items()}
        self.rates = replace(self.rates, **moved)

    def tenant_namespace(self, tenant: bytes) -> Namespace:
        """Return the namespace of one tenant of this model."""
        digest = xxhash.xxh3_128(self.model_namespace or b"no model namespace")
        digest.update(tenant)
        return Namespace(digest.digest())
