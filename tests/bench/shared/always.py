"""Serves as `python -m proxy` does, but fetches whatever it can, however long that takes.

python -m tests.bench.shared.always serve ...
"""

from dataclasses import replace
from typing import Any

from proxy.__main__ import main
from proxy.core.sharing import Fetch, best_fetch
from proxy.serving import fetching

LIMIT_SECONDS = 600.0


def _always(*arguments: Any) -> Fetch | None:
    fetch = best_fetch(*arguments)
    return fetch and replace(fetch, seconds=0.0, limit_seconds=LIMIT_SECONDS)


if __name__ == "__main__":
    vars(fetching)["best_fetch"] = _always
    main()
