"""Has llama-swap load a model, and sees whether it tells the client about it (sendLoadingState).

No field of its API says that; but with it a stream that waits for a model begins at once, with status 200,
even one that llama-server then refuses.
"""

from typing import Any

from proxy.errors import UpstreamRefused
from proxy.upstream.llama_server import LlamaServer


async def load_and_listen(root: LlamaServer, model: str) -> bool:
    """Have a model loaded that is not; return whether a client is told. Raises UpstreamFault.

    What asks for it is no request that llama-server takes, so no slot is touched.
    """
    body = {"model": model, "stream": True, "messages": ""}
    try:
        await root.call("POST", "/v1/chat/completions", dict[str, Any], body, seconds=None)
    except UpstreamRefused as refusal:
        # A stream of events is no JSON, so it counts as refused too.
        if refusal.status not in (200, 400):
            raise
        return refusal.status == 200
    return False
