"""Which state files are likely in the page cache: those that were saved or restored lately.

A restore from memory is several times faster than one from the disk. The kernel is not asked: the files
last used that fit into half of the memory that was available at the start count as warm.
"""

from collections import OrderedDict
from pathlib import Path

from proxy.core.model import Checkpoint, CheckpointId

_FALLBACK_BYTES = 8 << 30
"""Taken where the system does not say how much memory is free."""


class WarmFiles:
    """The checkpoints whose files were written or read last, up to *max_bytes* of them."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._sizes: OrderedDict[CheckpointId, int] = OrderedDict()
        self._size_bytes = 0

    def __contains__(self, checkpoint_id: CheckpointId) -> bool:
        return checkpoint_id in self._sizes

    def note(self, checkpoint: Checkpoint) -> None:
        """Note that the whole file was just written or read."""
        self.forget(checkpoint.id)
        self._sizes[checkpoint.id] = checkpoint.size_bytes
        self._size_bytes += checkpoint.size_bytes
        while self._size_bytes > self._max_bytes:
            _, size_bytes = self._sizes.popitem(last=False)
            self._size_bytes -= size_bytes

    def forget(self, checkpoint_id: CheckpointId) -> None:
        self._size_bytes -= self._sizes.pop(checkpoint_id, 0)


def page_cache_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return how many bytes of files the kernel may well keep in memory."""
    try:
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024 // 2
    except (OSError, KeyError, ValueError):
        return _FALLBACK_BYTES
