"""What an exact infinite cache would evaluate. Pure.

It knows every earlier prompt and the answer to it, in the order in which the prompts were sent, and has
to evaluate at least one token of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.tokens import TokenIds, common_prefix_length


@dataclass(frozen=True, slots=True)
class Exchange:
    """A prompt, and the prompt with its answer behind it, in tokens."""

    prompt: TokenIds
    with_answer: TokenIds


def exact_new_tokens(exchanges: Sequence[Exchange]) -> list[int]:
    """Return for each of *exchanges*, in the order of sending, how many tokens nobody had evaluated."""
    return [
        _new_tokens(exchange.prompt, exchanges[:index]) for index, exchange in enumerate(exchanges)
    ]


def _new_tokens(prompt: TokenIds, earlier: Sequence[Exchange]) -> int:
    n_known = max((common_prefix_length(prompt, e.with_answer) for e in earlier), default=0)
    return len(prompt) - min(n_known, len(prompt) - 1)
