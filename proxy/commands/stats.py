"""`llama-prefix-cache stats`: what is stored, and what it has brought."""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import click
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table

from proxy.commands.access import Access, OfRunningProxy, with_store
from proxy.commands.llama_servers import (
    LlamaServerStats,
    ask_llama_servers,
    llama_server_in_words,
)
from proxy.commands.printing import console, print_json
from proxy.commands.words import age_in_words, size_in_words
from proxy.core.views.listing import ListedCheckpoint

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
