"""The last requests, in memory only: what each reused, and why not more.

Owns: how many are remembered.
"""

from collections import OrderedDict
from itertools import islice

from proxy.core.records import Explanation, RequestRecord

MAX_REQUESTS = 2000
LAST = "last"


class Journal:
    """Remembers requests that have ended."""

    def __init__(self) -> None:
        self._explanations: OrderedDict[str, Explanation] = OrderedDict()
        self.n_recorded = 0
        """How many requests have ended since the proxy was started: it tells whether there is news."""

    def add(self, explanation: Explanation) -> None:
        """Remember a request that has just ended; the oldest one may be forgotten for it."""
        self._explanations[explanation.request.id] = explanation
        self.n_recorded += 1
        if len(self._explanations) > MAX_REQUESTS:
            self._explanations.popitem(last=False)

    def latest(self, limit: int) -> list[RequestRecord]:
        """Return the last requests, the newest first."""
        newest_first = islice(reversed(self._explanations.values()), max(0, limit))
        return [explanation.request for explanation in newest_first]

    def explain(self, request_id: str) -> Explanation | None:
        """Return the explanation of a request by its id, or of the last one; None if there is none."""
        if request_id == LAST:
            return next(reversed(self._explanations.values()), None)
        return self._explanations.get(request_id)
