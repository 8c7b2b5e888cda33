"""What a scripted conversation cost: the prompts of its requests as tokens of llama-server."""

import json
from dataclasses import dataclass

from proxy.core.tokens import TokenIds, common_prefix_length, token_ids
from proxy.llama.requests import as_chat_body, generation_route, parse_body
from tests.clients.scripted_server import Recorded, ScriptedServer

SLACK_TOKENS = 32
GENERATION_PROMPT_TOKENS = 8


@dataclass(frozen=True)
class Turn:
    """One request: its prompt, and what was evaluated since the request before it was answered."""

    recorded: Recorded
    tokens: TokenIds
    n_known: int
    """How many of its tokens the most similar earlier prompt begins with."""
    n_evaluated: int

    @property
    def n_new(self) -> int:
        return len(self.tokens) - self.n_known

    @property
    def n_reused(self) -> int:
        return len(self.tokens) - self.n_evaluated


def turns_of(server: ScriptedServer, n_before: int) -> list[Turn]:
    """Return all requests so far; *n_before* tokens had been evaluated before the first of them.

    Where several ran at once only the sum of what they cost is true.
    """
    turns: list[Turn] = []
    for recorded in server.recorded:
        tokens = tokens_of(server, recorded)
        n_known = max((common_prefix_length(tokens, turn.tokens) for turn in turns), default=0)
        n_now = recorded.n_evaluated_so_far
        # A llama-server that was started again counts from nothing.
        turns.append(
            Turn(recorded, tokens, n_known, n_now - n_before if n_now >= n_before else n_now)
        )
        n_before = n_now
    return turns


def tokens_of(server: ScriptedServer, recorded: Recorded) -> TokenIds:
    """Return a prompt as llama-server sees it; on the Messages API held against its own count."""
    route = generation_route("POST", recorded.path)
    body = parse_body(json.dumps(recorded.body).encode())
    assert route and body
    status, rendered = server.request("POST", "/apply-template", as_chat_body(route, body).fields)
    assert status == 200, rendered
    content = {"content": rendered["prompt"], "add_special": True, "parse_special": True}
    tokens = token_ids(server.request("POST", "/tokenize", content)[1]["tokens"])
    if recorded.path == "/v1/messages":
        counted = server.request("POST", "/v1/messages/count_tokens", recorded.body)[1]
        assert counted["input_tokens"] == len(tokens)
    return tokens


def assert_only_new_is_evaluated(turns: list[Turn]) -> None:
    for turn in turns:
        assert turn.n_evaluated <= turn.n_new + SLACK_TOKENS, told(turns)


def assert_only_new_is_evaluated_in_all(turns: list[Turn]) -> None:
    """Assert it of requests at the same time, of which only sums are true."""
    n_needed = sum(turn.n_new + SLACK_TOKENS for turn in turns)
    assert sum(turn.n_evaluated for turn in turns) <= n_needed, told(turns)


def assert_append_only(turns: list[Turn]) -> None:
    """Assert that each prompt begins with the one before it, but for what asks for an answer."""
    for before, turn in zip(turns, turns[1:], strict=False):
        assert turn.n_known >= len(before.tokens) - GENERATION_PROMPT_TOKENS, told(turns)


def assert_shared_at_once(turns: list[Turn], first: Turn, second: Turn) -> None:
    """Assert that of two agents that began at the same moment the second one did not evaluate it all.

    Only sums are true of requests at the same time. The first one may have to evaluate what it shares
    with its parent: no point was known there. The second one may evaluate the message that it begins
    with, which was on its way when it came.
    """
    n_needed = sum(turn.n_new + SLACK_TOKENS for turn in turns) + first.n_known
    assert second.n_known > 0.9 * len(second.tokens)
    assert sum(turn.n_evaluated for turn in turns) <= n_needed + 0.1 * second.n_known, told(turns)


def told(turns: list[Turn]) -> str:
    """Return the figures, one line for each request."""
    return "\n".join(
        f"{i}: {len(t.tokens)} tokens, {t.n_new} new, {t.n_evaluated} evaluated"
        f"{'' if t.recorded.has_tools else ', no tools'}"
        for i, t in enumerate(turns)
    )
