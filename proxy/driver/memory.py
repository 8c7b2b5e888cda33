"""What the index remembers of a model from one process to the next: its rule, tenants and sizes."""

from proxy.core.model import Rule
from proxy.core.prefix import Namespace, TokenIds
from proxy.core.state_size import StateSize
from proxy.driver.attachment import Attachment
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


def known_tenants(store: CheckpointStore, attachment: Attachment) -> set[bytes]:
    """Return the tenants that this model has served before."""
    return set(store.index.value(_tenants_name(attachment), list[bytes]) or [])


async def remember_tenant(store: CheckpointStore, attachment: Attachment, tenant: bytes) -> None:
    attachment.tenants.add(tenant)
    await store.put_value(_tenants_name(attachment), sorted(attachment.tenants))


def _tenants_name(attachment: Attachment) -> str:
    return f"tenants {(attachment.model_namespace or b'').hex()}"


def known_rule(store: CheckpointStore, attachment: Attachment, build: str) -> Rule | None:
    """Return the rule that a self-test of this model on this build has learned before."""
    return store.index.value(_rule_name(attachment, build), Rule)


async def remember_rule(
    store: CheckpointStore, attachment: Attachment, build: str, rule: Rule
) -> None:
    await store.put_value(_rule_name(attachment, build), rule)


def _rule_name(attachment: Attachment, build: str) -> str:
    namespace = attachment.model_namespace or b""
    return f"rule {namespace.hex()} {build}"


def known_sizes(store: CheckpointStore, attachment: Attachment) -> list[StateSize]:
    """Return the sizes of the states that the self-test of this model has saved."""
    return store.index.value(_sizes_name(attachment), list[StateSize]) or []


async def remember_sizes(store: CheckpointStore, attachment: Attachment) -> None:
    await store.put_value(_sizes_name(attachment), list(attachment.sizes))


def _sizes_name(attachment: Attachment) -> str:
    return f"sizes {(attachment.model_namespace or b'').hex()}"
