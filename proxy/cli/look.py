"""`llama-prefix-cache stats` and `explain`: what the cache has brought, and why a request missed."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table
from rich.text import Text

from proxy.cli.access import Access, OfRunningProxy, admin_option, find_admin, with_store
from proxy.cli.common import (
    Admin,
    age_in_words,
    config_option,
    console,
    json_option,
    print_json,
    size_in_words,
)
from proxy.explain.causes import Cause, PromptPart
from proxy.explain.explanation import Divergence, Explanation, Nearest, RequestRecord
from proxy.explain.views import ListedCheckpoint

# The llama-servers behind a running proxy: how each is doing, and what it did for the last requests.


_ALL_REQUESTS = {"limit": "1000000"}


class Attached(msgspec.Struct, frozen=True):
    """One llama-server as /health tells of it."""

    llama_server: str
    rule: str | None = None
    slots: dict[str, int] = {}


class _Requests(msgspec.Struct):
    requests: list[RequestRecord]


class LlamaServerStats(msgspec.Struct, frozen=True):
    """One llama-server, or model of a host; the name is empty if there is only one.

    `slots` are counted by state. The requests are the last ones, as far as the proxy remembers them.
    """

    name: str
    is_attached: bool
    rule: str | None
    slots: dict[str, int]
    n_requests: int = 0
    reused_tokens: int = 0
    evaluated_tokens: int = 0


def ask_llama_servers(admin: Admin, health: dict[str, Any]) -> list[LlamaServerStats]:
    """Return those that *health* tells of; raises msgspec.ValidationError if it is not ours."""
    if "llama_servers" not in health:
        return llama_servers_of({"": msgspec.convert(health, Attached)}, ())
    attached = msgspec.convert(health["llama_servers"], dict[str, Attached])
    requests = admin.ask("GET", "/requests", _Requests, _ALL_REQUESTS).requests
    return llama_servers_of(attached, requests)


def llama_servers_of(
    attached: dict[str, Attached], requests: Sequence[RequestRecord]
) -> list[LlamaServerStats]:
    """Return each with its share of *requests*."""
    servers = []
    for name, each in sorted(attached.items()):
        own = [request for request in requests if name and request.server == name]
        servers.append(
            LlamaServerStats(
                name=name,
                is_attached=each.llama_server == "attached",
                rule=each.rule,
                slots=each.slots,
                n_requests=len(own),
                reused_tokens=sum(request.confirmed or 0 for request in own),
                evaluated_tokens=sum(request.evaluated or 0 for request in own),
            )
        )
    return servers


def llama_server_in_words(server: LlamaServerStats) -> str:
    """Return a line on one of them."""
    if not server.is_attached:
        words = "not attached"
    else:
        slots = ", ".join(f"{n} {state}" for state, n in sorted(server.slots.items()))
        words = f"rule: {server.rule}; slots: {slots}"
    if server.n_requests:
        n_tokens = server.reused_tokens + server.evaluated_tokens
        share = f", {100 * server.reused_tokens / n_tokens:.0f}% reused" if n_tokens else ""
        words += f"; {server.n_requests:,} of the last requests{share}"
    return f"{server.name}: {words}" if server.name else words


# `llama-prefix-cache stats`: what is stored, and what it has brought.


_PREFIX = "llama_prefix_cache_"


class Stored(msgspec.Struct, frozen=True):
    """What the store holds; the limit is what a running proxy goes by."""

    n_checkpoints: int
    size_bytes: int
    max_store_bytes: int | None
    n_pinned: int
    pinned_bytes: int
    n_namespaces: int
    n_sessions: int
    n_restores: int
    last_used_at: float | None
    kinds: dict[str, int]


class Brought(msgspec.Struct, frozen=True):
    """What became of requests since the proxy started.

    `saved_seconds` are those of evaluation that reuse has spared, less what restores have cost more than
    they spared; `missed_tokens` were known and evaluated nevertheless, by cause.
    """

    state: str
    requests: dict[str, int]
    reused_tokens: int
    evaluated_tokens: int
    restored_tokens: int
    n_restored: int
    restore_seconds: float
    evaluation_seconds: float
    saved_seconds: float
    missed_tokens: dict[str, int]
    written_bytes: int
    n_evicted: int


@click.command()
@with_store
def stats(store: Access, as_json: bool) -> None:
    """Say what is stored, and what it has brought.

    \b
    llama-prefix-cache stats
    llama-prefix-cache stats --json | jq .since_start.reused_tokens
    llama-prefix-cache stats --slot-save-path /var/lib/llama-prefix-cache     only what is stored
    """
    brought, max_bytes = None, None
    servers: list[LlamaServerStats] = []
    if isinstance(store, OfRunningProxy):
        try:
            samples = read_samples(store.admin.raw("GET", "/metrics").decode())
            health = store.admin.ask("GET", "/health", dict[str, Any])
            brought = _brought(samples, health["state"])
            max_bytes = int(samples["checkpoint_limit_bytes", ""])
            servers = ask_llama_servers(store.admin, health)
        except (ValueError, KeyError):
            store.admin.fail_foreign()
    stored = summary(store.checkpoints(), max_bytes)
    if as_json:
        print_json({"store": stored, "llama_servers": servers, "since_start": brought})
    else:
        console().print(_table(stored, servers, brought))


def summary(checkpoints: Sequence[ListedCheckpoint], max_bytes: int | None) -> Stored:
    """Return what a list of checkpoints amounts to."""
    pinned = [c for c in checkpoints if c.is_pinned]
    return Stored(
        n_checkpoints=len(checkpoints),
        size_bytes=sum(c.size_bytes for c in checkpoints),
        max_store_bytes=max_bytes,
        n_pinned=len(pinned),
        pinned_bytes=sum(c.size_bytes for c in pinned),
        n_namespaces=len({c.parent.split("/")[0] for c in checkpoints}),
        n_sessions=len({c.parent for c in checkpoints if c.parent.count("/") == 2}),
        n_restores=sum(c.n_restores for c in checkpoints),
        last_used_at=max((c.last_used_at for c in checkpoints), default=None),
        kinds=dict(Counter(c.kind for c in checkpoints)),
    )


def read_samples(exposition: str) -> dict[tuple[str, str], float]:
    """Return the proxy's samples by name and the value of their only label, "" if there is none."""
    return {
        (sample.name.removeprefix(_PREFIX), next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
        if len(sample.labels) <= 1
    }


def _brought(samples: dict[tuple[str, str], float], state: str) -> Brought:
    def of(name: str) -> dict[str, int]:
        return {label: int(value) for (n, label), value in samples.items() if n == name}

    return Brought(
        state=state,
        requests=of("requests_total"),
        reused_tokens=of("prompt_tokens_total")["reused"],
        evaluated_tokens=of("prompt_tokens_total")["evaluated"],
        restored_tokens=int(samples["restored_tokens_total", ""]),
        n_restored=int(samples["restores_total", "done"]),
        restore_seconds=round(samples["restore_seconds_sum", ""], 3),
        evaluation_seconds=round(samples["evaluation_seconds_total", ""], 3),
        saved_seconds=round(
            samples["saved_seconds_total", "live"]
            + samples["saved_seconds_total", "restored"]
            - samples["lost_seconds_total", ""],
            3,
        ),
        missed_tokens={cause: n for cause, n in of("missed_tokens_total").items() if n},
        written_bytes=int(samples["written_bytes_total", ""]),
        n_evicted=sum(of("evictions_total").values()),
    )


def _table(stored: Stored, servers: Sequence[LlamaServerStats], brought: Brought | None) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    limit = f" of {size_in_words(stored.max_store_bytes)}" if stored.max_store_bytes else ""
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(stored.kinds.items()))
    table.add_row("checkpoints", f"{stored.n_checkpoints:,} ({kinds or 'nothing is stored'})")
    table.add_row("on disk", size_in_words(stored.size_bytes) + limit)
    table.add_row("pinned", f"{stored.n_pinned} with {size_in_words(stored.pinned_bytes)}")
    table.add_row("sessions", f"{stored.n_sessions}, of {stored.n_namespaces} models or API keys")
    if stored.last_used_at is not None:
        table.add_row("last used", age_in_words(time.time() - stored.last_used_at))
    table.add_row("restored", f"{stored.n_restores}x in all")
    for number, server in enumerate(servers):
        title = "llama-servers" if server.name else "llama-server"
        table.add_row("" if number else title, llama_server_in_words(server))
    if brought is not None:
        _add_brought(table, brought)
    return table


def _add_brought(table: Table, brought: Brought) -> None:
    n_tokens = brought.reused_tokens + brought.evaluated_tokens
    share = f"{100 * brought.reused_tokens / n_tokens:.0f}%" if n_tokens else "none yet"
    outcomes = ", ".join(f"{n} {outcome}" for outcome, n in brought.requests.items() if n)
    table.add_row()
    table.add_row("since start", f"the proxy is {brought.state}")
    table.add_row("requests", f"{sum(brought.requests.values()):,} ({outcomes or 'none yet'})")
    table.add_row(
        "prompt tokens",
        f"{brought.reused_tokens:,} reused ({share}), {brought.evaluated_tokens:,} evaluated in "
        f"{brought.evaluation_seconds:.1f} s",
    )
    table.add_row(
        "restores",
        f"{brought.n_restored} in {brought.restore_seconds:.1f} s: {brought.restored_tokens:,} tokens",
    )
    table.add_row("time saved", f"{brought.saved_seconds:.1f} s of evaluation")
    causes = sorted(brought.missed_tokens.items(), key=lambda item: -item[1])
    table.add_row(
        "missed", ", ".join(f"{n:,} tokens by {cause}" for cause, n in causes) or "nothing"
    )
    table.add_row("written", size_in_words(brought.written_bytes))
    table.add_row("deleted", f"{brought.n_evicted} checkpoints")


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
    lines = [_head(request), *_reuse(request)]
    if request.why:
        lines.append(Text(f"plan: {request.chosen or 'none'}, {request.why}", style="dim"))
    lines += [Text(), _cause(request), Text(explanation.says)]
    if request.cause.is_miss:
        lines.append(Text("cure: ", style="bold").append(explanation.cure, style="not bold"))
    if explanation.nearest is not None:
        lines.append(_nearest(explanation.nearest))
    if explanation.divergence is not None:
        lines += [Text(), *_difference(explanation.divergence)]
    return Text("\n").join(lines)


def _head(request: RequestRecord) -> Text:
    colour = _COLOURS.get(request.outcome, "default")
    by = f"  by {request.server}" if request.server else ""
    return Text(request.outcome, style=f"bold {colour}").append(
        f"  {request.id}  {request.path}{by}", style="not bold default"
    )


def _reuse(request: RequestRecord) -> Iterator[Text]:
    if request.n_prompt is not None and request.confirmed is not None:
        line = f"{request.confirmed:,} of {request.n_prompt:,} tokens reused"
        if request.n_missed:
            line += f", {request.n_missed:,} evaluated again"
        if (request.saved_seconds or 0) >= 0.005:
            line += f"; {request.saved_seconds:.2f} s saved"
        yield Text(line)


def _cause(request: RequestRecord) -> Text:
    text = Text(f"cause: {request.cause.value}", style="bold")
    if request.cause is Cause.HIT or request.part is PromptPart.NOWHERE:
        return text
    place = _PARTS[request.part]
    number = "" if request.message is None else f" (message {request.message})"
    return text.append(f", {place}{number}", style="not bold")


def _nearest(nearest: Nearest) -> Text:
    if nearest.id is None:
        return Text(f"nearest: a kept state, {nearest.n_common:,} tokens in common", style="dim")
    return Text(
        f"nearest: request {nearest.id}, {nearest.age_seconds or 0:,.0f} s before, {nearest.n_common:,} "
        f"of its {nearest.n_tokens or 0:,} tokens in common",
        style="dim",
    )


def _difference(divergence: Divergence) -> Iterator[Text]:
    if not divergence.known and not divergence.now:
        yield Text(f"  known tokens: {list(divergence.known_ids)}", style="red")
        yield Text(f"  now:          {list(divergence.now_ids)}", style="green")
        return
    yield Text("  ..." + _visible(divergence.before), style="dim")
    known, now = _visible(divergence.known), _visible(divergence.now)
    matcher = SequenceMatcher(None, known, now, autojunk=False)
    old, new = Text("- ", style="red"), Text("+ ", style="green")
    for kind, i, j, k, m in matcher.get_opcodes():
        strong = kind != "equal"
        old.append(known[i:j], style="bold reverse" if strong else "")
        new.append(now[k:m], style="bold reverse" if strong else "")
    yield old
    yield new


def _visible(text: str) -> str:
    """Return a text on one line, without what a terminal would obey."""
    plain = text.replace("\n", "⏎")
    return "".join(c if c.isprintable() else "�" for c in plain)


# `llama-prefix-cache explain`: why a request reused no more of its prompt than it did.


@click.command()
@click.argument("request_id", default="last", metavar="[REQUEST_ID|last|miss]")
@admin_option
@config_option
@json_option
def explain(request_id: str, admin: str | None, config: Path | None, as_json: bool) -> None:
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
    listener = find_admin(admin, config)
    body = listener.raw("GET", f"/requests/{quote(request_id, safe='')}")
    explanation = listener.decode(body, Explanation)
    if as_json:
        click.echo(msgspec.json.format(body, indent=2))
    else:
        console().print(explanation_text(explanation), soft_wrap=True)
