"""What a model's namespace is in another store."""

from proxy.core.namespace import choose_namespace, new_namespace
from proxy.core.prefix import Namespace
from proxy.driver.contact.identity import tenant_namespace
from proxy.driver.contact.known_models import (
    Owner,
    known_namespaces,
    known_tenants,
    namespaces_name,
    tenants_name,
)
from proxy.store.index import Index


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
