"""Which models an index knows, what they are called, and whose namespaces are theirs.

A namespace's own bytes only mean something within one index: there, they are entered under what was
known of the model without evaluating anything, beside the canary that it predicted.
"""

from collections.abc import Iterator
from typing import Protocol, TypeVar

import msgspec

from proxy.core.namespace import KnownNamespace
from proxy.core.prefix import Namespace
from proxy.driver.contact.identity import tenant_namespace
from proxy.store.index import Index

NAMESPACES_PREFIX = "namespaces "
T = TypeVar("T")


class Values(Protocol):
    """The values of an index, open or read."""

    def value(self, name: str, value_type: type[T]) -> T | None: ...


class Owner(msgspec.Struct, frozen=True):
    """Whose states a namespace's are: a model and a tenant of it, in the words of any store."""

    static: str
    known: KnownNamespace
    tenant: bytes


def owners(index: Index) -> Iterator[tuple[Namespace, Owner]]:
    """Yield every namespace that an index can name the owner of."""
    for name in index.names(NAMESPACES_PREFIX):
        static = name.removeprefix(NAMESPACES_PREFIX)
        for known in known_namespaces(index, static):
            model = Namespace(known.id)
            for tenant in {b"", *known_tenants(index, model)}:
                yield tenant_namespace(model, tenant), Owner(static, known, tenant)


def model_names(index: Index) -> dict[Namespace, str]:
    """Return what the model of each namespace is called, as far as that is known."""
    return {namespace: o.known.name for namespace, o in owners(index) if o.known.name}


def knows_models(index: Index) -> bool:
    """Return whether any model was ever served from this index."""
    return any(index.names(NAMESPACES_PREFIX))


def known_namespaces(values: Values, static: str) -> list[KnownNamespace]:
    """Return the models that have been met under the same *static* key."""
    return values.value(namespaces_name(static), list[KnownNamespace]) or []


def known_tenants(values: Values, model_namespace: Namespace | None) -> set[bytes]:
    """Return the tenants that a model has served."""
    return set(values.value(tenants_name(model_namespace), list[bytes]) or [])


def namespaces_name(static: str) -> str:
    return NAMESPACES_PREFIX + static


def tenants_name(model_namespace: Namespace | None) -> str:
    return f"tenants {(model_namespace or b'').hex()}"
