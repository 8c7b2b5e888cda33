"""The models and tenants that an index knows, and their namespaces.

The bytes of a namespace only mean something within one index. The index has them under the static key of
the model, which is known without evaluating anything, beside the canary that the model predicted.
"""

from collections.abc import Iterator

import msgspec
import xxhash

from proxy.core.model import KnownNamespace, choose_namespace, is_same_canary, tenant_namespace
from proxy.core.tokens import Namespace
from proxy.store.index import Index

NAMESPACES_PREFIX = "namespaces "
TENANTS_PREFIX = "tenants "


class Owner(msgspec.Struct, frozen=True):
    """The model and tenant that own the states of a namespace, in terms that hold in any store."""

    static: str
    known: KnownNamespace
    tenant: bytes

    def has_same_model(self, other: "Owner") -> bool:
        """Return whether the states of both owners are of one model, even in different stores."""
        return self.static == other.static and is_same_canary(self.known.canary, other.known.canary)


def owners(index: Index) -> Iterator[tuple[Namespace, Owner]]:
    """Yield every namespace whose owner the index knows, and that owner."""
    for name in index.names(NAMESPACES_PREFIX):
        static = name.removeprefix(NAMESPACES_PREFIX)
        for known in known_namespaces(index, static):
            model = Namespace(known.id)
            for tenant in {b"", *known_tenants(index, model)}:
                yield tenant_namespace(model, tenant), Owner(static, known, tenant)


def model_names(index: Index) -> dict[Namespace, str]:
    """Return the name of the model of each namespace, where it is known."""
    return {namespace: o.known.name for namespace, o in owners(index) if o.known.name}


def known_namespaces(index: Index, static: str) -> list[KnownNamespace]:
    """Return the models that have been met under the same *static* key."""
    return index.value(namespaces_name(static), list[KnownNamespace]) or []


def known_tenants(index: Index, model_namespace: Namespace | None) -> set[bytes]:
    """Return the tenants that a model has served."""
    return set(index.value(tenants_name(model_namespace), list[bytes]) or [])


def namespaces_name(static: str) -> str:
    return NAMESPACES_PREFIX + static


def tenants_name(model_namespace: Namespace | None) -> str:
    return TENANTS_PREFIX + (model_namespace or b"").hex()


def namespace_of(index: Index, owner: Owner) -> Namespace | None:
    """Return the namespace of the same model and tenant in this index; None if it has not met the model."""
    chosen = choose_namespace(known_namespaces(index, owner.static), owner.known.canary)
    return tenant_namespace(Namespace(chosen.id), owner.tenant) if chosen else None


def introduce(index: Index, owner: Owner) -> Namespace:
    """Enter a model and its tenant, if they are not known yet; return their namespace."""
    # Not the given id: in this index it may already stand for another model.
    model = introduce_model(index, owner.static, owner.known.canary, owner.known.name)
    introduce_tenants(index, model, {owner.tenant})
    return tenant_namespace(model, owner.tenant)


def introduce_model(
    index: Index, static: str, canary: list[tuple[int, float]], name: str, *, renames: bool = False
) -> Namespace:
    """Enter a model if it is not known yet; return its namespace. A known one may get another *name*."""
    known = known_namespaces(index, static)
    chosen = choose_namespace(known, canary)
    # No other model ever gets the same id: the index of the shared store may be older than this one.
    new_id = xxhash.xxh3_128_digest(f"{static} {canary}".encode())
    named = chosen or KnownNamespace(new_id, canary, name)
    named = msgspec.structs.replace(named, name=name) if renames else named
    if named != chosen:
        others = (each for each in known if each is not chosen)
        index.put_value(namespaces_name(static), [*others, named])
    return Namespace(named.id)


def introduce_tenants(index: Index, model: Namespace | None, tenants: set[bytes]) -> None:
    """Enter those tenants of a model that are not known yet."""
    known = known_tenants(index, model)
    if not tenants <= known:
        index.put_value(tenants_name(model), sorted(known | tenants))
