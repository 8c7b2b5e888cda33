"""`llama-prefix-cache stats` and `explain`: what the cache has brought, and why a request missed."""

from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from typing import Any
from urllib.parse import quote

import click
from rich.text import Text

from proxy.cli.access import RunningProxy, with_proxy
from proxy.cli.common import answer, checkpoints_in_words, table_of
from proxy.core.rates import seconds_in_words
from proxy.explain.causes import Cause, PromptPart
from proxy.explain.compare import Divergence
from proxy.explain.views import Explanation, Nearest
from proxy.settings import size_in_words

# `llama-prefix-cache stats`: how the proxy and its llama-servers are doing, and what reuse has brought.


@click.command()
@with_proxy
def stats(proxy: RunningProxy, as_json: bool) -> None:
    """Say how the proxy is doing, and what it has brought today.

    \b
    llama-prefix-cache stats
    llama-prefix-cache stats --json | jq .today.n_reused

    Today began at midnight, or when the proxy was started. `ls` says what is stored, /metrics has all
    numbers.
    """
    overview = proxy.ask("GET", "/overview", dict[str, Any])
    try:
        answer(overview, table_of(stats_rows(overview)), as_json=as_json)
    except KeyError:
        proxy.fail_foreign()


def stats_rows(overview: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what the live page shows above its requests, line by line."""
    yield "the proxy", f"is {overview['state']} since {overview['since']}"
    if store := overview["store"]:
        stored = checkpoints_in_words(store["n_checkpoints"], store["size_bytes"])
        yield "stored", f"{stored} of {size_in_words(store['max_bytes'])}"
    for server in overview["servers"]:
        states = Counter(slot["state"] for slot in server["slots"])
        slots = ", ".join(f"{n} {state}" for state, n in sorted(states.items()))
        yield f"llama-server {server['name']}".strip(), f"rule: {server['rule']}; slots: {slots}"
    today = overview["today"]
    yield "today", f"since {datetime.fromtimestamp(today['since']):%Y-%m-%d %H:%M}"
    yield "requests", f"{today['n_requests']:,}, of which {today['n_reusing']:,} reused something"
    share = f"{today['n_reused'] / max(1, today['n_prompt']):.0%}"
    yield "prompt tokens", f"{today['n_prompt']:,}, of which {today['n_reused']:,} reused ({share})"
    yield "restored", f"{today['n_restored']:,} of the reused tokens"
    yield "missed", f"{today['n_missed']:,} tokens: `explain miss` says why"
    yield "time saved", f"{seconds_in_words(today['saved_seconds'] or 0)} of evaluation"


# An explanation as people read it, with what has changed in colour.


_COLOURS = {"hit": "green", "partial": "yellow", "miss": "red", "unanswered": "red"}
_PARTS = {
    PromptPart.TOOLS: "in the tools",
    PromptPart.SYSTEM: "in the system prompt",
    PromptPart.USER: "in a message of the user",
    PromptPart.ASSISTANT: "in an answer of the model",
    PromptPart.TOOL_RESULT: "in a tool's result",
    PromptPart.TEXT: "in the text",
}


def explanation_text(explanation: Explanation) -> Text:
    """Return an explanation for a terminal."""
    request = explanation.request
    by = f"  by {request.server}" if request.server else ""
    outcome = request.outcome, f"bold {_COLOURS.get(request.outcome, 'default')}"
    lines = [Text.assemble(outcome, f"  {request.id}  {request.path}{by}")]
    if request.n_prompt is not None and request.confirmed is not None:
        reuse = f"{request.confirmed:,} of {request.n_prompt:,} tokens reused"
        if request.n_missed:
            reuse += f", {request.n_missed:,} evaluated again"
        if (request.saved_seconds or 0) >= 0.0005:
            reuse += f"; {seconds_in_words(request.saved_seconds or 0)} saved"
        lines.append(Text(reuse))
    if request.why:
        lines.append(Text(f"plan: {request.chosen or 'none'}, {request.why}", style="dim"))
    place = ""
    if request.cause is not Cause.HIT and request.part is not PromptPart.NOWHERE:
        number = "" if request.message is None else f" (message {request.message})"
        place = f", {_PARTS[request.part]}{number}"
    cause = Text.assemble((f"cause: {request.cause.value}", "bold"), place)
    lines += [Text(), cause, Text(explanation.says)]
    if request.cause.is_miss:
        lines.append(Text.assemble(("cure: ", "bold"), explanation.cure))
    if explanation.nearest is not None:
        lines.append(Text(f"nearest: {_nearest(explanation.nearest)} in common", style="dim"))
    if explanation.divergence is not None:
        lines += [Text(), *_difference(explanation.divergence)]
    return Text("\n").join(lines)


def _nearest(nearest: Nearest) -> str:
    if nearest.id is None:
        return f"a kept state, {nearest.n_common:,} tokens"
    age, n_tokens = f"{nearest.age_seconds or 0:,.0f} s before", nearest.n_tokens or 0
    return f"request {nearest.id}, {age}, {nearest.n_common:,} of its {n_tokens:,} tokens"


def _difference(divergence: Divergence) -> Iterator[Text]:
    if not divergence.known and not divergence.now:
        yield Text(f"  known tokens: {list(divergence.known_ids)}", style="red")
        yield Text(f"  now:          {list(divergence.now_ids)}", style="green")
        return
    yield Text("  ..." + _visible(divergence.before), style="dim")
    yield Text(f"- {_visible(divergence.known)}", style="red")
    yield Text(f"+ {_visible(divergence.now)}", style="green")


def _visible(text: str) -> str:
    """Return a text on one line, without what a terminal would obey."""
    plain = text.replace("\n", "⏎")
    return "".join(c if c.isprintable() else "�" for c in plain)


# `llama-prefix-cache explain`: why a request reused no more of its prompt than it did.


@click.command()
@click.argument("request_id", default="last", metavar="[REQUEST_ID|last|miss]")
@with_proxy
def explain(proxy: RunningProxy, request_id: str, as_json: bool) -> None:
    """Say what a request reused, why not more, and what helps.

    REQUEST_ID is the id of its log line; without one it is the last request, and with `miss` the last one
    that evaluated what was known. Exit status: 0 it is explained, 1 there is no such request (any more),
    69 no proxy answers.

    \b
    Examples:
      llama-prefix-cache explain
      llama-prefix-cache explain miss
      llama-prefix-cache explain 5f0c1a2b --json
      llama-prefix-cache explain last --admin http://192.168.1.5:8082
    """
    explanation = proxy.ask("GET", f"/requests/{quote(request_id, safe='')}", Explanation)
    answer(explanation, explanation_text(explanation), as_json=as_json)
