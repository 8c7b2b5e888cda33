"""Says on stderr what is being measured, so that stdout is nothing but tables."""

import sys
import time

_BEGAN = time.monotonic()


def tell(what: str) -> None:
    """Print what begins now."""
    print(f"[{time.monotonic() - _BEGAN:4.0f} s] {what}", file=sys.stderr, flush=True)
