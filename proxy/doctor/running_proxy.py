"""Asks a proxy that uses the directory how it is doing, at its admin listener."""

import aiohttp
import msgspec

from proxy.addresses import reachable
from proxy.core.degradation import DegradationKind
from proxy.doctor.facts import ProxyFacts

_SECONDS = 10.0


_PASSING = (
    DegradationKind.ATTACHING,
    DegradationKind.LOADING,
    DegradationKind.SELF_TEST_PENDING,
)
"""They end by themselves, so they are nothing to mend."""


class _Reason(msgspec.Struct):
    kind: str
    reason: str


class _Writes(msgspec.Struct, frozen=True):
    bytes_last_day: int = 0
    max_bytes_per_day: int = 0


class _Attached(msgspec.Struct):
    rule: str = "not attached"


class _Health(msgspec.Struct):
    state: str
    rule: str = ""
    llama_servers: dict[str, _Attached] = {}
    reasons: list[_Reason] = []
    writes: _Writes = _Writes()


def _rule(health: _Health) -> str:
    """Return the rule of the only llama-server, or that of each."""
    rules = (f"{name}: {each.rule}" for name, each in sorted(health.llama_servers.items()))
    return health.rule or ", ".join(rules) or "none yet, no model was loaded"


async def ask_proxy(session: aiohttp.ClientSession, admin: str, lock: str) -> ProxyFacts:
    """Return what GET /health at *admin* (HOST:PORT) says, or that nobody answers there."""
    url = f"http://{reachable(admin)}/health"
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=_SECONDS)) as reply:
            health = msgspec.json.decode(await reply.read(), type=_Health)
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError):
        return ProxyFacts(admin=admin, lock=lock)
    return ProxyFacts(
        admin=admin,
        lock=lock,
        answers=True,
        is_caching=health.state != "forwarding",
        rule=_rule(health),
        reasons=tuple(each.reason for each in health.reasons if each.kind not in _PASSING),
        written_last_day_bytes=health.writes.bytes_last_day,
        max_write_bytes_per_day=health.writes.max_bytes_per_day,
    )
