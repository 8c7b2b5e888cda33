"""`llama-prefix-cache stats` and `explain`: what the cache has brought, and why a request missed."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

import click
from prometheus_client.parser import text_string_to_metric_families
from rich.text import Text

from proxy.cli.access import RunningProxy, Store, with_proxy, with_store
from proxy.cli.common import age_in_words, answer, checkpoints_in_words, table_of
from proxy.explain.causes import Cause, PromptPart
from proxy.explain.compare import Divergence
from proxy.explain.views import Explanation, ListedCheckpoint, Nearest, RequestRecord
from proxy.settings import size_in_words

# `llama-prefix-cache stats`: what is stored, how the llama-servers are doing, and what it has brought.


_PREFIX = "llama_prefix_cache_"
_Facts = dict[str, Any]
Row = tuple[str, str]
Samples = dict[str, dict[str, float]]


@click.command()
@with_store
def stats(store: Store, as_json: bool) -> None:
    """Say what is stored, and what it has brought.

    \b
    llama-prefix-cache stats
    llama-prefix-cache stats --json | jq .since_start.prompt_tokens_total.reused
    llama-prefix-cache stats --slot-save-path /var/lib/llama-prefix-cache     only what is stored
    """
    max_bytes, health, samples, rows = None, None, Samples(), list[Row]()
    if isinstance(store, RunningProxy):
        try:
            samples = read_samples(store.raw("GET", "/metrics").decode())
            max_bytes = int(samples["checkpoint_limit_bytes"][""])
            health, query = store.ask("GET", "/health", _Facts), {"limit": "1000000"}
            requests = store.ask("GET", "/requests", dict[str, list[RequestRecord]], query)
            rows = [*server_rows(health, requests["requests"]), ("", "")]
            rows += [("since start", f"the proxy is {health['state']}"), *_brought_rows(samples)]
        except (ValueError, KeyError):
            store.fail_foreign()
    stored = summary(store.checkpoints(), max_bytes)
    brought = {name: values.get("", values) for name, values in samples.items()} or None
    content = {"store": stored, "health": health, "since_start": brought}
    answer(content, table_of([*_stored_rows(stored), *rows]), as_json=as_json)


def summary(checkpoints: Sequence[ListedCheckpoint], max_bytes: int | None) -> _Facts:
    """Return what a list of checkpoints amounts to."""
    pinned = [c for c in checkpoints if c.is_pinned]
    return {
        "n_checkpoints": len(checkpoints),
        "size_bytes": sum(c.size_bytes for c in checkpoints),
        "max_store_bytes": max_bytes,
        "n_pinned": len(pinned),
        "pinned_bytes": sum(c.size_bytes for c in pinned),
        "n_namespaces": len({c.parent.split("/")[0] for c in checkpoints}),
        "n_sessions": len({c.parent for c in checkpoints if c.parent.count("/") == 2}),
        "n_restores": sum(c.n_restores for c in checkpoints),
        "last_used_at": max((c.last_used_at for c in checkpoints), default=None),
        "kinds": dict(Counter(c.kind for c in checkpoints)),
    }


def _stored_rows(stored: _Facts) -> Iterator[Row]:
    max_bytes = stored["max_store_bytes"]
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(stored["kinds"].items()))
    yield "checkpoints", f"{stored['n_checkpoints']:,} ({kinds or 'nothing is stored'})"
    limit = f" of {size_in_words(max_bytes)}" if max_bytes else ""
    yield "on disk", size_in_words(stored["size_bytes"]) + limit
    yield "pinned", checkpoints_in_words(stored["n_pinned"], stored["pinned_bytes"])
    yield "sessions", f"{stored['n_sessions']}, of {stored['n_namespaces']} models or API keys"
    if stored["last_used_at"] is not None:
        yield "last used", age_in_words(time.time() - stored["last_used_at"])
    yield "restored", f"{stored['n_restores']}x in all"


def server_rows(health: _Facts, requests: Sequence[RequestRecord]) -> Iterator[Row]:
    """Yield a line on each llama-server that *health* tells of, with its share of the last *requests*.

    The requests of the only llama-server at one address are not told apart.
    """
    servers = health.get("llama_servers", {"": health})
    title = "llama-server" if "" in servers else "llama-servers"
    for name, about in sorted(servers.items()):
        slots = ", ".join(f"{n} {state}" for state, n in sorted(about.get("slots", {}).items()))
        is_attached = about["llama_server"] == "attached"
        words = f"rule: {about.get('rule')}; slots: {slots}" if is_attached else "not attached"
        if own := [request for request in requests if name and request.server == name]:
            n_reused = sum(request.confirmed or 0 for request in own)
            share = _share(n_reused, sum(request.evaluated or 0 for request in own))
            words += f"; {len(own):,} of the last requests, {share} reused"
        yield title, f"{name}: {words}" if name else words
        title = ""


def _share(n_reused: float, n_evaluated: float) -> str:
    n_tokens = n_reused + n_evaluated
    return f"{100 * n_reused / n_tokens:.0f}%" if n_tokens else "none"


def read_samples(exposition: str) -> Samples:
    """Return the proxy's samples by name and the value of their only label, "" if there is none."""
    samples: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if len(sample.labels) <= 1 and not sample.name.endswith("_bucket"):
                label = next(iter(sample.labels.values()), "")
                samples[sample.name.removeprefix(_PREFIX)][label] = sample.value
    return dict(samples)


def _brought_rows(samples: Samples) -> Iterator[Row]:
    """Yield what became of requests since the proxy started."""

    def total(name: str) -> float:
        return sum(samples[name].values())

    requests, tokens = samples["requests_total"], samples["prompt_tokens_total"]
    outcomes = ", ".join(f"{n:.0f} {outcome}" for outcome, n in requests.items() if n)
    yield "requests", f"{total('requests_total'):,.0f} ({outcomes or 'none yet'})"
    reused = f"{tokens['reused']:,.0f} reused ({_share(tokens['reused'], tokens['evaluated'])})"
    seconds = total("evaluation_seconds_total")
    yield "prompt tokens", f"{reused}, {tokens['evaluated']:,.0f} evaluated in {seconds:.1f} s"
    n_restores, n_tokens = samples["restores_total"]["done"], total("restored_tokens_total")
    seconds = total("restore_seconds_sum")
    yield "restores", f"{n_restores:.0f} in {seconds:.1f} s: {n_tokens:,.0f} tokens"
    # Restores may have cost more than they spared.
    seconds = total("saved_seconds_total") - total("lost_seconds_total")
    yield "time saved", f"{seconds:.1f} s of evaluation"
    missed = sorted(((n, cause) for cause, n in samples["missed_tokens_total"].items() if n))
    causes = ", ".join(f"{n:,.0f} tokens by {cause}" for n, cause in reversed(missed))
    yield "missed", causes or "nothing"
    yield "written", size_in_words(total("written_bytes_total"))
    yield "deleted", f"{total('evictions_total'):.0f} checkpoints"


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
        if (request.saved_seconds or 0) >= 0.005:
            reuse += f"; {request.saved_seconds:.2f} s saved"
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
