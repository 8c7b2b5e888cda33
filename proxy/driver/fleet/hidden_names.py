"""Names that a host has for its models and does not list, found out by asking for them."""

from contextlib import suppress

from cachetools import TTLCache

from proxy.errors import UpstreamFault, UpstreamRefused
from proxy.upstream.hosts.model_host import ModelHost

_N_UNKNOWN = 256
_UNKNOWN_SECONDS = 60.0
"""So long a name that no model has is not asked for again."""


class HiddenNames:
    """Asks a host for names that it does not list."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host
        self._unknown: TTLCache[str, bool] = TTLCache(_N_UNKNOWN, _UNKNOWN_SECONDS)

    def may_be_one(self, name: str) -> bool:
        """Return whether a name that is not listed may be a model's."""
        return self._host.hides_names and name not in self._unknown

    async def find(self, name: str) -> str | None:
        """Return the model of that name, None if there is none or it cannot be told now; may load it."""
        with suppress(UpstreamFault):  # it may be known later
            try:
                found = await self._host.resolve(name)
            except UpstreamRefused:
                found = None
            if found is None:
                self._unknown[name] = True
            return found
        return None
