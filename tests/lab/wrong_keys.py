"""Requests of every shape, as clients send them whose key llama-server may not take."""

import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from tests.lab.conversation import prose

_TEXT = prose(31, 60)
_IMAGE = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
_ASKED = [{"role": "user", "content": _TEXT}]
_SHOWN = [{"role": "user", "content": [{"type": "image", "source": _IMAGE}]}]
_PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}

Shape = tuple[str, bytes]
"""A path and a body."""


def _shape(path: str, **fields: Any) -> Shape:
    return path, json.dumps(fields).encode()


_CHAT = "/v1/chat/completions"
SHAPES: Mapping[str, Shape] = {
    "chat": _shape(_CHAT, messages=_ASKED, max_tokens=2),
    "stream": _shape(_CHAT, messages=_ASKED, max_tokens=2, stream=True),
    "completions": _shape("/v1/completions", prompt=_TEXT, max_tokens=2),
    "completion": _shape("/completion", prompt=_TEXT, n_predict=2),
    "token ids": _shape("/completion", prompt=[*range(300, 600)], n_predict=2),
    "prompts": _shape("/completion", prompt=[_TEXT, "b"], n_predict=2),
    "messages": _shape("/v1/messages", messages=_ASKED, max_tokens=2),
    "messages with an image": _shape("/v1/messages", messages=_SHOWN, max_tokens=2),
    "chat with an image": _shape(_CHAT, messages=[{"role": "user", "content": [_PICTURE]}]),
    "responses": _shape("/v1/responses", input=_TEXT, max_output_tokens=2),
    "embeddings": _shape("/v1/embeddings", input=_TEXT),
    "rerank": _shape("/rerank", query="a", documents=[_TEXT, "b"]),
    "infill": _shape("/infill", input_prefix=_TEXT, input_suffix="b", n_predict=2),
    "n is 2": _shape(_CHAT, messages=_ASKED, max_tokens=2, n=2),
    "no JSON": (_CHAT, b'{"messages": ['),
    "no object": ("/completion", b'["prompt"]'),
    "no JSON for messages": ("/v1/messages", b"\xff"),
    "nothing": ("/v1/embeddings", b""),
    "audio": ("/v1/audio/transcriptions", b"no form"),
}
REFUSED = ("no JSON", "no object", "no JSON for messages", "nothing")
"""Those that llama-server refuses whoever sends them."""


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def send(
    client: aiohttp.ClientSession, base_url: str, shape: Shape, key: str | None
) -> tuple[int, bytes]:
    """Send a request; return its status and answer."""
    path, body = shape
    headers = {"Content-Type": "application/json", **(bearer(key) if key else {})}
    async with client.post(base_url + path, data=body, headers=headers) as reply:
        return reply.status, await reply.read()
