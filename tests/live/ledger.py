"""What a perfect cache would have to evaluate, and what llama-server really evaluates."""

import json
from typing import Any

from proxy.core.tokens import TokenIds, common_prefix_length, token_ids
from proxy.llama.requests import as_chat_body, generation_route, parse_body
from tests.lab.apis import CHAT, Api, Usage
from tests.lab.conversation import Message, tools
from tests.lab.rig import Rig

SLACK_TOKENS = 32
TOOLS = tools(3)


class Ledger:
    """Knows every prompt sent so far, and what a perfect cache would have to evaluate for the next."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.sequences: list[TokenIds] = []

    async def tokens(self, messages: list[Message]) -> TokenIds:
        """Return a request's prompt as llama-server will see it."""
        body: dict[str, Any] = {"messages": messages, "tools": TOOLS}
        rendered = await self.rig.post("/apply-template", body)
        content = {"content": rendered["prompt"], "add_special": True, "parse_special": True}
        return token_ids((await self.rig.post("/tokenize", content))["tokens"])

    async def enter(self, messages: list[Message]) -> int:
        """Remember a request; return how many of its tokens no earlier one began with."""
        tokens = await self.tokens(messages)
        n_known = max((common_prefix_length(tokens, s) for s in self.sequences), default=0)
        self.sequences.append(tokens)
        return len(tokens) - n_known

    async def ask(self, messages: list[Message]) -> tuple[int, int, int]:
        """Send a request; return its new tokens, those evaluated for it, and its prompt's length."""
        n_new = await self.enter(messages)
        before = await self.rig.evaluated()
        reply = await self.rig.chat(messages, tools=TOOLS)
        n_evaluated = await self.rig.evaluated() - before
        n_prompt = len(self.sequences[-1])
        assert reply["usage"]["prompt_tokens"] == n_prompt
        return n_new, n_evaluated, n_prompt


class ApiLedger(Ledger):
    """The same for another API than chat completions, streaming or not."""

    def __init__(self, rig: Rig, api: Api, *, stream: bool = False, n_generated: int = 4) -> None:
        super().__init__(rig)
        self.api = api
        self._fields: dict[str, Any] = {"stream": stream, **api.limit(n_generated)}
        if stream and api is CHAT:
            self._fields["stream_options"] = {"include_usage": True}

    async def tokens(self, messages: list[Message]) -> TokenIds:
        """Return a request's prompt as llama-server will see it, by its own count."""
        body = self.api.ask(messages, TOOLS)
        route, given = (
            generation_route("POST", self.api.path),
            parse_body(json.dumps(body).encode()),
        )
        assert route and given
        rendered = await self.rig.post("/apply-template", as_chat_body(route, given).fields)
        content = {"content": rendered["prompt"], "add_special": True, "parse_special": True}
        tokens = token_ids((await self.rig.post("/tokenize", content))["tokens"])
        counted = await self.rig.post(self.api.count_path, body)
        assert counted["input_tokens"] == len(tokens)
        return tokens

    async def send(self, messages: list[Message], **fields: Any) -> Usage:
        """Send a request; return what its answer says."""
        body = self.api.ask(messages, TOOLS, **{**self._fields, **fields})
        async with self.rig.client.post(self.rig.base_url + self.api.path, json=body) as reply:
            content = await reply.read()
            assert reply.status == 200, content
            return self.api.read(content)

    async def ask(self, messages: list[Message]) -> tuple[int, int, int]:
        n_new = await self.enter(messages)
        before = await self.rig.evaluated()
        usage = await self.send(messages)
        n_evaluated = await self.rig.evaluated() - before
        assert usage.n_prompt == len(self.sequences[-1])
        assert usage.n_cached == usage.n_prompt - n_evaluated
        return n_new, n_evaluated, usage.n_prompt
