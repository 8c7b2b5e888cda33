"""Which models are served: what the value of a checkpoint depends on besides the checkpoint itself."""

import time

from proxy.core.keeping.eviction import Present
from proxy.core.prefix import Namespace
from proxy.core.rates import Rates
from proxy.driver.contact.attachment import Attachment
from proxy.upstream.target import Target


class Served:
    """The newest attachment of each llama-server; a model that its host has unloaded will come back."""

    def __init__(self) -> None:
        self._by_target: dict[Target, Attachment] = {}

    def note(self, target: Target, attachment: Attachment) -> None:
        """Note what a llama-server serves now, if that is known."""
        if attachment.can_cache:
            self._by_target[target] = attachment
        else:
            self._by_target.pop(target, None)

    def present(self, newest: Attachment | None = None) -> Present:
        """Return the present, in which a *newest* attachment counts that was not noted yet."""
        attachments = [*self._by_target.values(), *filter(None, [newest])]
        rates_by: dict[Namespace, Rates] = {}
        for attachment in attachments:
            if attachment.can_cache:
                tenants = {b"", *attachment.tenants}
                names = [attachment.tenant_namespace(tenant) for tenant in tenants]
                rates_by.update(dict.fromkeys(names, attachment.rates))
        rates = attachments[-1].rates if attachments else Rates()
        return Present(time.time(), rates, rates_by)
