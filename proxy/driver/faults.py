"""Where cache faults end: counted every time, logged once, never a client's error."""

from proxy.errors import CacheFault, UpstreamRefused
from proxy.log import get_logger
from proxy.metrics import Metrics

_MAX_REMEMBERED = 256
_ABOUT_PROMPTS = ("tokenize", "stabilize")


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
        reason = _reason(stage, error)
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


def _reason(stage: str, error: BaseException) -> str:
    """Return what went wrong, without words of a prompt.

    llama-server quotes what it cannot render or parse: arguments of a tool call that are no JSON, say.
    """
    if stage in _ABOUT_PROMPTS and isinstance(error, UpstreamRefused):
        return f"llama-server answered {error.status}"
    return str(error) or type(error).__name__
