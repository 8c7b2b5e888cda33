"""What the index remembers of a model from one process to the next.

Its self-test, tenants, sizes and rates.
"""

from proxy.core.keeping.state_size import StateSize
from proxy.core.prefix import Namespace, TokenIds
from proxy.core.probes import SelfTestResult
from proxy.core.rates import Rates
from proxy.driver.contact.attachment import Attachment
from proxy.driver.contact.known_models import tenants_name
from proxy.store.store import CheckpointStore


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
