"""Which models an index knows, what they are called, and whose namespaces are theirs.

A namespace's own bytes only mean something within one index: there, they are entered under what was
known of the model without evaluating anything, beside the canary that it predicted.
"""

from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from proxy.core.model import (
    UNKEYED_BYTES,
    Checkpoint,
    KnownNamespace,
    choose_namespace,
    new_namespace,
    tenant_namespace,
)
from proxy.core.tokens import Namespace
from proxy.store.index import Index

NAMESPACES_PREFIX = "namespaces "
TENANTS_PREFIX = "tenants "


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


def read_index(directory: Path) -> tuple[list[Checkpoint], dict[Namespace, Owner]]:
    """Return the checkpoints and the owners of their namespaces in an index; nothing if there is none.

    Leaves no trace. Raises StoreFault if the index cannot be read, is damaged or of another format. Not for
    an index that this process has open: LMDB forbids a second time.
    """
    if not (directory / "index" / "data.mdb").exists():
        return [], {}
    with TemporaryDirectory() as scratch:
        with closing(Index(directory / "index", scratch=Path(scratch))) as index:
            return index.all(), dict(owners(index))


def model_names(index: Index) -> dict[Namespace, str]:
    """Return what the model of each namespace is called, as far as that is known."""
    return {namespace: o.known.name for namespace, o in owners(index) if o.known.name}


def knows_models(index: Index) -> bool:
    """Return whether any model was ever served from this index."""
    return any(index.names(NAMESPACES_PREFIX))


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


def unkeyed_tenants(index: Index) -> Iterator[tuple[Namespace, bytes]]:
    """Yield the models' tenants that are called by what anybody could make of a guessed API key."""
    for name in index.names(TENANTS_PREFIX):
        with suppress(ValueError):  # the name of a damaged value
            model = Namespace(bytes.fromhex(name.removeprefix(TENANTS_PREFIX)))
            yield from ((model, t) for t in known_tenants(index, model) if len(t) == UNKEYED_BYTES)


def namespace_of(index: Index, owner: Owner) -> Namespace | None:
    """Return the namespace of the same model and tenant in this index; None if it has not met the model."""
    chosen = choose_namespace(known_namespaces(index, owner.static), owner.known.canary)
    return tenant_namespace(Namespace(chosen.id), owner.tenant) if chosen else None


def introduce(index: Index, owner: Owner) -> Namespace:
    """Enter a model and its tenant, if they are not known yet; return their namespace."""
    known = known_namespaces(index, owner.static)
    chosen = choose_namespace(known, owner.known.canary)
    if chosen is None:
        # An id means another model here if as many have been met under the same name.
        chosen = new_namespace(owner.static, known, owner.known.canary, owner.known.name)
        index.put_value(namespaces_name(owner.static), [*known, chosen])
    model = Namespace(chosen.id)
    tenants = known_tenants(index, model)
    if owner.tenant not in tenants:
        index.put_value(tenants_name(model), sorted(tenants | {owner.tenant}))
    return tenant_namespace(model, owner.tenant)
