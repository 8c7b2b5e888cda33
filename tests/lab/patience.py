"""What the proxy gives up after fractions of a second, which a busy machine may need for anything."""

import pytest

from proxy.core import sharing
from proxy.serving import fetching
from proxy.shared import transfers
from tests.lab.waiting import HANG_SECONDS


def wait_for_shared_store(monkeypatch: pytest.MonkeyPatch, *, at_any_rate: bool = False) -> None:
    """Have requests wait for what the shared store lists and sends; one that hangs holds them up.

    A transfer that comes too slowly is given up, unless it may come *at_any_rate*.
    """
    monkeypatch.setattr(transfers, "_STALL_SECONDS", HANG_SECONDS)
    if at_any_rate:
        monkeypatch.setattr(sharing, "_TRIED_SHARE", HANG_SECONDS)
    for name in ("_LOOK_SHARE", "_MOST_LOOK_SECONDS"):
        monkeypatch.setattr(fetching, name, HANG_SECONDS)
