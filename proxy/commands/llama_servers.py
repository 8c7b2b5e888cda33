"""The llama-servers behind a running proxy: how each is doing, and what it did for the last requests."""

from collections.abc import Sequence
from typing import Any

import msgspec

from proxy.commands.admin import Admin
from proxy.core.explaining.records import RequestRecord

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
