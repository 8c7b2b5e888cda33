"""Where cache faults end: counted every time, logged once, never a client's error."""

from proxy.errors import CacheFault
from proxy.log import get_logger
from proxy.metrics import Metrics

_MAX_REMEMBERED = 256


class Faults:
    """Counts and reports faults of the cache."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._log = get_logger("cache")
        self._seen: set[tuple[str, str]] = set()

    def count(self, stage: str) -> None:
        """Count a fault that is told elsewhere, as a degradation."""
        self._metrics.cache_faults.labels(stage).inc()

    def record(self, stage: str, error: BaseException) -> None:
        """Count a fault; log it if the same one was not logged before."""
        self.count(stage)
        reason = str(error) or type(error).__name__
        if self._is_new(stage, reason):
            is_foreseen = isinstance(error, CacheFault)
            self._log.warning(
                "cache fault", stage=stage, reason=reason, exc_info=None if is_foreseen else error
            )

    def _is_new(self, stage: str, reason: str) -> bool:
        is_new = (stage, reason) not in self._seen
        if is_new and len(self._seen) < _MAX_REMEMBERED:
            self._seen.add((stage, reason))
        return is_new
