"""A machine that always takes the same time, for tests of what follows from that: the real one is busy.

Whether a restore or a save pays is decided by rates that the proxy learns from its own measurements.
"""

import pytest

from proxy.core.rates import Rates

_CALL_SECONDS, _TOKEN_SECONDS, _BYTE_SECONDS = 5e-3, 1e-4, 2e-9
"""About what an idle core takes for a tiny model."""


def measure_an_idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all measurements of rates, by this process, be those of an idle machine."""
    evaluation, restore, save = Rates.after_evaluation, Rates.after_restore, Rates.after_save

    def after_evaluation(rates: Rates, n_from: int, n_to: int, _: float) -> Rates:
        return evaluation(rates, n_from, n_to, _CALL_SECONDS + (n_to - n_from) * _TOKEN_SECONDS)

    def after_restore(rates: Rates, size_bytes: int, _: float, *, is_warm: bool) -> Rates:
        return restore(rates, size_bytes, _moving(size_bytes), is_warm=is_warm)

    def after_save(rates: Rates, size_bytes: int, _: float) -> Rates:
        return save(rates, size_bytes, _moving(size_bytes))

    monkeypatch.setattr(Rates, "after_evaluation", after_evaluation)
    monkeypatch.setattr(Rates, "after_restore", after_restore)
    monkeypatch.setattr(Rates, "after_save", after_save)


def _moving(size_bytes: int) -> float:
    return _CALL_SECONDS + size_bytes * _BYTE_SECONDS
