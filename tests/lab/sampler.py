"""Watches how many bytes of state files lie in a directory, from a thread of its own."""

import os
import threading
import time
from pathlib import Path
from types import TracebackType

PAUSE_SECONDS = 0.002


class SizeSampler:
    """Sums the sizes of all state files, temporary ones included, every few milliseconds."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._told = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.largest_bytes = 0
        self.n_samples = 0

    def __enter__(self) -> "SizeSampler":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._told.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._told.is_set():
            n_bytes = self._sample()
            if n_bytes is not None:
                self.n_samples += 1
                self.largest_bytes = max(self.largest_bytes, n_bytes)
            time.sleep(PAUSE_SECONDS)

    def _sample(self) -> int | None:
        """Return the bytes of all files; None if files came or went meanwhile.

        Otherwise one that was deleted and one that was begun after that would be added up.
        """
        names = self._names()
        try:
            n_bytes = sum((self._directory / name).stat().st_size for name in names)
        except FileNotFoundError:
            return None
        return n_bytes if self._names() == names else None

    def _names(self) -> list[str]:
        names = sorted(os.listdir(self._directory))
        return [name for name in names if name.startswith("lpc-") and not name.endswith(".meta")]
