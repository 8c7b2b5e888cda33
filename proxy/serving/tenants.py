"""Whose request it is: API keys, the tenants that they name, and the client.

Tenants share no states. A tenant is named by the API key that llama-server would check, and by the salt of
a request; where llama-server checks no key, the key does not count.
"""

import asyncio
import re
from collections.abc import Mapping
from functools import partial

import xxhash
from multidict import MultiMapping

from proxy.core.conditions import DegradationKind
from proxy.core.model import keyed_tenant, salted_tenant
from proxy.errors import ProxyError, StoreFault, UpstreamFault, WillBeRefused
from proxy.serving.process import Process
from proxy.serving.request import Request
from proxy.store.known_models import introduce_tenants

_KEY_HEADERS = ("Authorization", "X-Api-Key")
_MAX_TENANTS = 4096
"""A client may send a new salt with each request. Beyond this number a tenant is not noted: its states are
lost with the index, because their records name no owner."""
_CLIENTS = {"claude-cli": "Claude Code", "opencode": "OpenCode", "codex_cli_rs": "codex"} | {
    "QwenCode": "Qwen Code"
}
_N_CLIENT = 40


def keys_of(headers: MultiMapping[str]) -> dict[str, str]:
    """Return those headers that carry an API key; raises ProxyError if llama-server may see others.

    Of a header that comes twice llama-server may read the other one, and what `Connection` names is not
    passed on.
    """
    keys = {name: headers[name] for name in _KEY_HEADERS if name in headers}
    dropped = headers.get("Connection", "").lower()
    if any(len(headers.getall(name)) > 1 or name.lower() in dropped for name in keys):
        raise ProxyError("an API key comes twice, or Connection names its header", 400)
    return keys


def tenant_of(keys: Mapping[str, str], secret: bytes, salt: str = "") -> bytes:
    """Return the tenant's name for the API key that llama-server would check, and a salt."""
    key, tenant = keys.get("Authorization") or keys.get("X-Api-Key", ""), b""
    if key:
        plain = key.removeprefix("Bearer ").encode(errors="surrogateescape")
        tenant = keyed_tenant(secret, xxhash.xxh3_128_digest(plain))
    return salted_tenant(secret, tenant, salt) if salt else tenant


def client_name(user_agent: str) -> str:
    """Return what people call the client that sends this User-Agent header, with its version."""
    product = re.match(r"([\w.-]+)/v?(\d[\w.-]*)", user_agent)
    if user_agent.startswith("Mozilla/"):
        return "a browser"
    if product:
        return f"{_CLIENTS.get(product[1], product[1])} {product[2]}"[:_N_CLIENT]
    return "".join(c for c in user_agent if c.isprintable())[:_N_CLIENT]


async def admit(process: Process, request: Request) -> None:
    """Note whose request it is; raises WillBeRefused if llama-server does not take the client's key.

    Nothing else proves a key: a prompt of token ids is not tokenized, and a request without a key is
    tokenized with the proxy's own. Each key is asked about once: a process keeps the keys that it has.
    """
    if process.asks_for_key:
        taken, digest = process.taken_keys, _key_digest(request)
        if digest not in taken:
            try:
                taken[digest] = await process.upstream.takes_key(request.keys)
            except UpstreamFault:
                return  # the next call finds out what is wrong with llama-server
        if not taken.get(digest, True):
            given = "this API key is refused" if request.keys else "an API key is needed"
            raise WillBeRefused(f"llama-server says that {given}")
    await note_tenant(process, request)


def note_taken(process: Process, request: Request) -> None:
    """Note that llama-server took the key of a request."""
    process.taken_keys[_key_digest(request)] = True


async def note_tenant(process: Process, request: Request) -> None:
    """Note a tenant whose key llama-server has taken, as long as there is room for its name."""
    tenant = process.tenant_here(request.tenant)
    is_new = tenant not in process.tenants and len(process.tenants) < _MAX_TENANTS
    if is_new:
        process.tenants.add(tenant)
        warn_of_several(process)
    is_new_there = process.tier and tenant and tenant not in process.tier.remote.tenants
    if is_new or is_new_there:
        remembering = process.tasks.start(_remember(process, request, is_new=is_new))
        if process.tier:  # else nothing needs the name before a state is committed, behind it
            await asyncio.shield(remembering)


async def _remember(process: Process, request: Request, *, is_new: bool) -> None:
    tenant, tier = process.tenant_here(request.tenant), process.tier
    with process.faults.suppressed("remember", StoreFault):
        if is_new and process.can_cache:
            named = process.store.index, process.model_namespace, process.tenants
            # On the writer's thread: another llama-server may note one at the same time.
            await process.store.write(partial(introduce_tenants, *named))
        if tier and tenant and tenant not in tier.remote.tenants:
            if tenant_of(request.keys, process.secret, request.salt) == request.tenant:
                # What the tenant is called on all machines with the same key file.
                name = tenant_of(request.keys, tier.remote.secret, request.salt)
                await tier.remote.note_tenant(tenant, process.tenant_here(name))


def warn_of_several(process: Process) -> None:
    """Warn of several tenants if llama-server's RAM cache, which does not tell them apart, is on."""
    tenants = process.tenants if process.is_one_tenant else process.tenants - {b""}
    if process.has_ram_cache and len(tenants) > 1:
        process.degrade(DegradationKind.SEVERAL_API_KEYS)


def _key_digest(request: Request) -> bytes:
    """Return a digest of the API key headers of a request."""
    return xxhash.xxh3_128_digest(repr(sorted(request.keys.items())).encode())
