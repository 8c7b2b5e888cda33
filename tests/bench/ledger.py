"""Knows every prompt that was sent, and so what a perfect cache must evaluate for the next one.

Asks llama-server directly to render and tokenize, which evaluates nothing.
"""

import asyncio
from typing import Any

from proxy.core.tokens import TokenIds, common_prefix_length, token_ids
from tests.bench.workload import Request
from tests.lab.server import LlamaServer


class Ledger:
    """The prompts that one llama-server has seen."""

    def __init__(self, server: LlamaServer) -> None:
        self._server = server
        self._prompts: list[TokenIds] = []

    async def tokens(self, request: Request) -> TokenIds:
        """Return a request's prompt as llama-server will see it."""
        rendered = await self._post("/apply-template", request.body())
        return await self.text_tokens(rendered["prompt"])

    async def text_tokens(self, text: str) -> TokenIds:
        content = {"content": text, "add_special": True, "parse_special": True}
        return token_ids((await self._post("/tokenize", content))["tokens"])

    def enter(self, prompt: TokenIds) -> int:
        """Remember a prompt; return how many of its tokens no earlier prompt began with."""
        n_known = max((common_prefix_length(prompt, p) for p in self._prompts), default=0)
        self._prompts.append(prompt)
        return len(prompt) - n_known

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        status, reply = await asyncio.to_thread(self._server.request, "POST", path, body)
        if status != 200:
            raise RuntimeError(f"{path}: {reply}")
        return dict(reply)
