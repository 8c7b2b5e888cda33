"""Which model a namespace belongs to, and what the same model's namespace is in another store.

A namespace's own bytes only mean something within one index: there, they are entered under what was
known of the model without evaluating anything, beside the canary that it predicted.
"""

from collections.abc import Iterator

import msgspec

from proxy.core.namespace import KnownNamespace, choose_namespace, new_namespace
from proxy.core.prefix import Namespace
from proxy.driver.contact.identity import tenant_namespace
from proxy.driver.contact.memory import NAMESPACES_PREFIX, namespaces_name, tenants_name
from proxy.store.index import Index


class Owner(msgspec.Struct, frozen=True):
    """Whose states a namespace's are: a model and a tenant of it, in the words of any store."""

    static: str
    known: KnownNamespace
    tenant: bytes


def owners(index: Index) -> Iterator[tuple[Namespace, Owner]]:
    """Yield every namespace that an index can name the owner of."""
    for name in index.names(NAMESPACES_PREFIX):
        for known in index.value(name, list[KnownNamespace]) or []:
            model = Namespace(known.id)
            for tenant in {b"", *(index.value(tenants_name(model), list[bytes]) or [])}:
                owner = Owner(name.removeprefix(NAMESPACES_PREFIX), known, tenant)
                yield tenant_namespace(model, tenant), owner


def namespace_of(index: Index, owner: Owner) -> Namespace | None:
    """Return the namespace of the same model and tenant in this index; None if it has not met the model."""
    known = index.value(namespaces_name(owner.static), list[KnownNamespace]) or []
    chosen = choose_namespace(known, owner.known.canary)
    return tenant_namespace(Namespace(chosen.id), owner.tenant) if chosen else None


def knows_models(index: Index) -> bool:
    """Return whether any model was ever served from this index."""
    return any(index.names(NAMESPACES_PREFIX))


def introduce(index: Index, owner: Owner) -> Namespace:
    """Enter a model and its tenant, if they are not known yet; return their namespace."""
    name = namespaces_name(owner.static)
    known = index.value(name, list[KnownNamespace]) or []
    chosen = choose_namespace(known, owner.known.canary)
    if chosen is None:
        # An id means another model here if as many have been met under the same name.
        chosen = new_namespace(owner.static, known, owner.known.canary)
        index.put_value(name, [*known, chosen])
    model = Namespace(chosen.id)
    tenants = set(index.value(tenants_name(model), list[bytes]) or [])
    if owner.tenant not in tenants:
        index.put_value(tenants_name(model), sorted(tenants | {owner.tenant}))
    return tenant_namespace(model, owner.tenant)
