"""Requests without their texts, in the format of Mooncake's traces: to be given away, and to be replayed.

Owns: what a trace has, what it tells in words, and prompts made up from its numbers. Pure. A line has a
request's time in ms, the lengths of prompt and answer in tokens, and a number for each 512 tokens of the
prompt, the last of which may be fewer. Two prompts have the same number if, and only if, they are the same
up to the end of that block (github.com/kvcache-ai/Mooncake, FAST25-release).
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise, takewhile
from keyword import kwlist
from operator import attrgetter
from statistics import median

import msgspec
from xxhash import xxh3_64_intdigest

from proxy.core.model import Prompt
from proxy.core.rates import seconds_in_words
from proxy.core.tokens import BLOCK_TOKENS, count_blocks, hash_prefixes, hash_whole

TRACED_TOKENS = 512


class TracedRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of a trace; before `numbered`, its time is since 1970, and its numbers are hashes."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: Sequence[int]


def traced(at: float, prompt: Prompt, n_answer: int) -> TracedRequest:
    """Return a request that came *at* so many seconds since 1970, with hashes in place of its tokens."""
    namespace, tokens = prompt.namespace, prompt.tokens
    first, step = count_blocks(TRACED_TOKENS) - 1, TRACED_TOKENS // BLOCK_TOKENS
    hashes = hash_prefixes(namespace, tokens)[first::step]
    if len(tokens) % TRACED_TOKENS:
        hashes.append(hash_whole(namespace, tokens, len(tokens)))
    ids = array("Q", [int.from_bytes(each[:8]) for each in hashes])
    return TracedRequest(round(at * 1000), len(tokens), n_answer, ids)


def numbered(requests: Iterable[TracedRequest]) -> list[TracedRequest]:
    """Return requests in order, with nothing that another trace or a guessed text can be compared with.

    Times are in whole seconds since the first request, and blocks are numbered as they appear.
    """
    ordered, numbers = sorted(requests, key=attrgetter("timestamp")), dict[int, int]()
    return [
        msgspec.structs.replace(
            request,
            timestamp=(request.timestamp - ordered[0].timestamp) // 1000 * 1000,
            hash_ids=[numbers.setdefault(each, len(numbers)) for each in request.hash_ids],
        )
        for request in ordered
    ]


def share_known(trace: Iterable[TracedRequest]) -> float:
    """Return the share of prompt tokens in blocks that an earlier request began with."""
    known, n_known, n_tokens = set[int](), 0, 0
    for request in trace:
        n_blocks = sum(1 for _ in takewhile(known.__contains__, request.hash_ids))
        n_known += min(n_blocks * TRACED_TOKENS, request.input_length - 1)
        n_tokens += request.input_length
        known.update(request.hash_ids)
    return n_known / max(1, n_tokens)


def trace_in_words(trace: Sequence[TracedRequest]) -> dict[str, str]:
    """Return what a trace tells, in lines; it has one request at least."""
    prompts = [request.input_length for request in trace]
    n_blocks = len(set().union(*(request.hash_ids for request in trace)))
    return {
        "requests": f"{len(trace):,} in {seconds_in_words(trace[-1].timestamp / 1000)}",
        "prompts": f"{min(prompts):,} to {max(prompts):,} tokens, half over {median(prompts):,.0f}",
        "answers": f"up to {max(request.output_length for request in trace):,} tokens",
        "blocks": f"{n_blocks:,} different ones, of which it has numbers alone",
        "known": f"{share_known(trace):.1%} of the tokens, in blocks that an earlier prompt had",
    }


def texts_of(trace: Sequence[TracedRequest]) -> dict[int, int]:
    """Return, by the number of each partial last block, the number of the block with whose text it begins.

    That is the block which next takes its place, as the next prompt of a conversation mostly goes on inside
    the last block of this one. A partial block that no other replaces has a text of its own.
    """
    text_of: dict[int, int] = {}
    next_behind: dict[int, int] = {}
    for request in reversed(trace):
        ids = request.hash_ids
        if request.input_length % TRACED_TOKENS and len(ids) > 1:
            text_of[ids[-1]] = next_behind.get(ids[-2], ids[-1])
        next_behind.update((one, text_of.get(other, other)) for one, other in pairwise(ids))
    return text_of


def words_for(request: TracedRequest, text_of: dict[int, int], words_per_token: float) -> str:
    """Return a prompt of about the request's length; equal numbers give equal texts."""
    words: list[str] = []
    for index, number in enumerate(request.hash_ids):
        n_tokens = min(TRACED_TOKENS, request.input_length - index * TRACED_TOKENS)
        text, n_words = text_of.get(number, number), round(n_tokens * words_per_token)
        chosen = (xxh3_64_intdigest(b"%d %d" % (text, i)) for i in range(n_words))
        words += [kwlist[digest % len(kwlist)] for digest in chosen]
    return " ".join(words)
