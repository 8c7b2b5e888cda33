"""The one thread that writes: LMDB wants one writer, and what it did must be noted whoever still waits."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from proxy.errors import StoreFault

T = TypeVar("T")


class Writer:
    """Does one piece of work after the other, in the order in which they came."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store-writer")

    def close(self) -> None:
        """Finish what is pending."""
        self._thread.shutdown(wait=True)

    async def write(
        self, work: Callable[[], T], *, then: Callable[[T], object] = lambda _: None
    ) -> T:
        """Do *work* on the thread and *then* on this one, even if the caller is cancelled.

        Raises StoreFault for any OSError.
        """
        written = asyncio.get_running_loop().run_in_executor(self._thread, work)
        written.add_done_callback(lambda w: w.exception() or then(w.result()))
        try:
            return await asyncio.shield(written)
        except OSError as error:
            raise StoreFault(str(error)) from error
