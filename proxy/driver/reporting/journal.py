"""The last requests, in memory only: what each reused, and why not more.

Owns: how many are remembered, and how much of their prompts.
"""

from collections import OrderedDict
from enum import StrEnum
from itertools import islice
from time import time

from proxy.core.explaining.causes import Cause
from proxy.core.explaining.known_prompts import KnownPrompts
from proxy.core.explaining.records import Explanation, RequestRecord
from proxy.core.prefix import Namespace, TokenIds
from proxy.core.views.overview import Today
from proxy.driver.reporting.today import DaySums

MAX_REQUESTS = 2000
MAX_BYTES = 48 << 20
LAST, MISS = "last", "miss"


class Keep(StrEnum):
    """How much of prompts is kept to explain what follows them."""

    NONE = "none"
    TOKENS = "tokens"
    TEXT = "text"


class Journal:
    """Remembers requests that have ended, and their prompts as far as *keep* allows."""

    def __init__(self, keep: Keep = Keep.TEXT) -> None:
        self._explanations: OrderedDict[str, Explanation] = OrderedDict()
        self.keep = keep
        self.prompts = KnownPrompts(MAX_BYTES, MAX_REQUESTS, keeps_text=keep is Keep.TEXT)
        self._day = DaySums(time())
        self.n_recorded = 0
        """How many requests have ended since the proxy was started: it tells whether there is news."""

    def add(self, explanation: Explanation) -> None:
        """Remember a request that has just ended; the oldest one may be forgotten for it."""
        self._explanations[explanation.request.id] = explanation
        self.n_recorded += 1
        self._day.add(explanation.request, time())
        if len(self._explanations) > MAX_REQUESTS:
            self._explanations.popitem(last=False)

    def today(self) -> Today:
        """Return what the requests of this day have reused."""
        return self._day.at(time())

    def note_loss(self, namespace: Namespace, tokens: TokenIds | None, cause: Cause) -> None:
        """Note why the state of these tokens is gone, for whoever misses it."""
        if tokens is not None:
            self.prompts.note_loss(namespace, tokens, cause)

    def latest(self, limit: int) -> list[RequestRecord]:
        """Return the last requests, the newest first."""
        newest_first = islice(reversed(self._explanations.values()), max(0, limit))
        return [explanation.request for explanation in newest_first]

    def explain(self, request_id: str) -> Explanation | None:
        """Return the explanation of a request by its id, of the last one or of the last miss, if any."""
        if request_id == LAST:
            return next(reversed(self._explanations.values()), None)
        if request_id == MISS:
            newest_first = reversed(self._explanations.values())
            return next((e for e in newest_first if e.request.cause.is_miss), None)
        return self._explanations.get(request_id)

    def why_unknown(self, request_id: str) -> str:
        """Return why there is no explanation of a request, in words."""
        if request_id == LAST:
            return "no request has ended since the proxy was started"
        if request_id == MISS:
            return f"none of the last {MAX_REQUESTS:,} requests has missed"
        return (
            f"no request {request_id} is known: its answer has not ended yet, it is not among the last "
            f"{MAX_REQUESTS:,}, or the proxy was restarted since"
        )
