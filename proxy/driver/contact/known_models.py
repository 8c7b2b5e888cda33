"""Which models an index knows, what they are called, and whose namespaces are theirs.

A namespace's own bytes only mean something within one index: there, they are entered under what was
known of the model without evaluating anything, beside the canary that it predicted.
"""

from collections.abc import Iterator

import msgspec

from proxy.core.namespace import KnownNamespace
from proxy.core.prefix import Namespace
from proxy.driver.contact.identity import tenant_namespace
from proxy.store.index import Index

NAMESPACES_PREFIX = "namespaces "


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


def model_names(index: Index) -> dict[Namespace, str]:
    """Return what the model of each namespace is called, as far as that is known."""
    return {namespace: o.known.name for namespace, o in owners(index) if o.known.name}


def knows_models(index: Index) -> bool:
    """Return whether any model was ever served from this index."""
    return any(index.names(NAMESPACES_PREFIX))


def namespaces_name(static: str) -> str:
    return NAMESPACES_PREFIX + static


def tenants_name(model_namespace: Namespace | None) -> str:
    return f"tenants {(model_namespace or b'').hex()}"
