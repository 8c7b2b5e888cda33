"""What llama-server was let write into the directory lately, kept in the index across restarts."""

import time
from collections.abc import Callable
from functools import partial

from proxy.core.keeping.write_budget import Wanted, Written, scarcity, why_refused
from proxy.errors import WRITE_BUDGET, NoRoom
from proxy.store.index import Index

_NAME = "written"


class WriteLedger:
    """Counts the bytes of saved files, and refuses saves that are over the budget of a day."""

    def __init__(self, index: Index, max_bytes_per_day: int) -> None:
        self._index = index
        self._written = index.value(_NAME, Written) or Written()
        self.max_bytes_per_day = max_bytes_per_day
        self.on_write: Callable[[int], None] = lambda _: None

    @property
    def last_day_bytes(self) -> int:
        return self._written.last_day_bytes(time.time())

    @property
    def left_bytes(self) -> int | None:
        """How much may be written now; None if there is no limit."""
        return self.max_bytes_per_day - self.last_day_bytes if self.max_bytes_per_day else None

    @property
    def has_plenty(self) -> bool:
        """Whether so much of the budget is left that nothing is refused for its worth."""
        left_bytes = self.left_bytes
        return left_bytes is None or scarcity(left_bytes, self.max_bytes_per_day) == 0

    def require(self, wanted: Wanted, pending_bytes: int) -> None:
        """Raise NoRoom if a save is not worth what is left of the budget."""
        budget, now = self.max_bytes_per_day, time.time()
        if refusal := why_refused(wanted, self._written, budget, now, pending_bytes):
            raise NoRoom(WRITE_BUDGET, refusal)

    def note(self, n_bytes: int, wanted: Wanted) -> Callable[[], None]:
        """Count *n_bytes* that were written; return what writes the count to the index."""
        self._written = self._written.after(n_bytes, wanted, time.time())
        self.on_write(n_bytes)
        return partial(self._index.put_value, _NAME, self._written)
