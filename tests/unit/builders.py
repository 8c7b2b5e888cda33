"""Short ways to make the values that core decides about."""

from typing import Any

from proxy.core.model import Candidate, Checkpoint, CheckpointId, CheckpointKind, Rule, RuleKind
from proxy.core.rates import POSITIONS, Rates, Transfer, UnitCost
from proxy.core.tokens import Namespace, TokenIds, token_ids

NAMESPACE = Namespace(b"n" * 16)
OTHER_NAMESPACE = Namespace(b"o" * 16)

ANY_PREFIX = Rule(RuleKind.ANY_PREFIX)
RESTORE_POINTS = Rule(RuleKind.RESTORE_POINTS)
END_ONLY = Rule(RuleKind.END_ONLY)
NOTHING = Rule(RuleKind.NOTHING)


def steady(tokens_per_second: float = 500.0, cold_bytes_per_second: float = 1e9) -> Rates:
    """Return rates that are the same at every position and size, and calls that cost nothing."""
    call, token = UnitCost(0.0, 1.0), UnitCost(1 / tokens_per_second, 1.0)
    transfer = Transfer(call, UnitCost(1 / cold_bytes_per_second, 1.0))
    return Rates(call, (token,) * len(POSITIONS), transfer, transfer, transfer)


def run_of(n_tokens: int, start: int = 0) -> TokenIds:
    """Return the tokens start, start + 1, ...: two runs share exactly what their numbers say."""
    return token_ids(range(start, start + n_tokens))


def branch(n_common: int, n_tokens: int) -> TokenIds:
    """Return *n_tokens* tokens of which exactly the first *n_common* are those of `run_of`."""
    return token_ids([*range(n_common), *range(1_000_000, 1_000_000 + n_tokens - n_common)])


def checkpoint(n_tokens: int, **changes: Any) -> Checkpoint:
    """Return a checkpoint of *n_tokens* tokens with unremarkable other fields."""
    fields: dict[str, Any] = {
        "id": CheckpointId(1),
        "namespace": NAMESPACE,
        "kind": CheckpointKind.CONVERSATION,
        "n_tokens": n_tokens,
        "restore_points": (),
        "has_every_position": False,
        "file_name": "lpc-0000000000000001.state",
        "size_bytes": 1000,
        "created_at": 0.0,
        "last_used_at": 0.0,
    }
    return Checkpoint(**(fields | changes))


def candidate(n_tokens: int, n_common: int, **changes: Any) -> Candidate:
    return Candidate(checkpoint(n_tokens, **changes), n_common)
