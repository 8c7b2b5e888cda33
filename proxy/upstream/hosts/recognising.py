"""Finds out what answers at a URL that is no llama-server with slots."""

import msgspec

from proxy.errors import UpstreamFault, UpstreamUnreachable
from proxy.upstream.hosts.model_host import ModelHost
from proxy.upstream.hosts.router import Router
from proxy.upstream.hosts.swap import Running, Swap
from proxy.upstream.llama_server import QUICK_SECONDS, LlamaServer


class _RouterProps(msgspec.Struct):
    role: str = ""
    max_instances: int | None = None


async def recognise(root: LlamaServer) -> ModelHost | None:
    """Return the host of models that answers at a URL; None if it is none, or cannot be asked now."""
    try:
        props = await root.call("GET", "/props", _RouterProps, seconds=QUICK_SECONDS)
        if props.role == "router":
            return Router(root, props.max_instances)
    except UpstreamUnreachable:
        return None
    except UpstreamFault:
        pass
    try:
        await root.call("GET", "/running", Running, seconds=QUICK_SECONDS)
    except UpstreamFault:
        return None
    return Swap(root)
