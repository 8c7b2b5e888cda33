"""Answers with log-probabilities, and how far apart two of them are. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

N_ANSWER_TOKENS = 32
FIELDS: dict[str, Any] = {"max_tokens": N_ANSWER_TOKENS, "logprobs": True, "top_logprobs": 10}
_LEAST_COMMON = 8


@dataclass(frozen=True, slots=True)
class Answer:
    """The likeliest first tokens with their log-probabilities, and the greedy text's tokens."""

    first: Mapping[int, float]
    tokens: tuple[int, ...]


def read_answer(reply: Mapping[str, Any]) -> Answer:
    """Return the answer that the reply of a chat, or of a native completion, holds."""
    native = reply.get("completion_probabilities")
    content = native or reply["choices"][0]["logprobs"]["content"]
    first = {top["id"]: top["logprob"] for top in content[0]["top_logprobs"]}
    return Answer(first, tuple(token["id"] for token in content))


def distance(left: Answer, right: Answer) -> float:
    """Return the largest difference of a log-probability of the first token."""
    common = left.first.keys() & right.first.keys()
    if len(common) < _LEAST_COMMON:
        return float("inf")  # another distribution altogether
    return max(abs(left.first[token] - right.first[token]) for token in common)


def diverges_at(left: Answer, right: Answer) -> int | None:
    """Return the index of the first token that differs between two greedy texts, or None."""
    if left.tokens == right.tokens:
        return None
    pairs = zip(left.tokens, right.tokens, strict=False)
    shorter = min(len(left.tokens), len(right.tokens))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
