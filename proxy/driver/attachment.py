"""What the proxy knows about the llama-server process it is attached to."""

from dataclasses import dataclass, field, replace

from proxy.core.model import NO_RULE, Rates, Rule
from proxy.core.prefix import Namespace
from proxy.core.probes import SelfTestResult
from proxy.driver.identity import tenant_namespace
from proxy.driver.leases import LeaseDesk


@dataclass
class Attachment:
    """One llama-server process, from first contact until it is gone.

    `model_namespace` is None where nothing may be saved or restored; `reasons` then says why.
    `rule` is *nothing* until the self-test has spoken; `n_contradictions` restores have not been reused
    as it says since. `disabled_shapes` are kinds of requests whose tokens the proxy predicted wrongly.
    `n_believed_points` context checkpoints of a live slot are counted on, the newest.
    `saves_context_checkpoints` says what the probe save showed: it depends on flags that llama-server
    does not tell, and so does the rule.
    """

    process_id: str
    build: str
    desk: LeaseDesk
    n_ctx: int
    n_believed_points: int = 10
    model_namespace: Namespace | None = None
    saves_context_checkpoints: bool = False
    rule: Rule = NO_RULE
    self_test: SelfTestResult | None = None
    rates: Rates = field(default_factory=Rates)
    reasons: list[str] = field(default_factory=list)
    disabled_shapes: set[str] = field(default_factory=set)
    tenants: set[bytes] = field(default_factory=set)
    n_contradictions: int = 0
    n_contradictions_allowed: int = 2

    @property
    def can_cache(self) -> bool:
        return self.model_namespace is not None

    def learn(self, **measured: float) -> None:
        """Move the named rates halfway towards what was just measured."""
        moved = {name: (getattr(self.rates, name) + value) / 2 for name, value in measured.items()}
        self.rates = replace(self.rates, **moved)

    def tenant_namespace(self, tenant: bytes) -> Namespace:
        """Return the namespace of one tenant of this model."""
        return tenant_namespace(self.model_namespace, tenant)
