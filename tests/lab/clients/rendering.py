"""Prompts of clients' requests as tokens of a real llama-server, and how much of one another keeps."""

import json
from collections.abc import Iterator
from typing import Any

from proxy.core.prefix import common_prefix_length, token_ids
from proxy.stabilize.memory import Memory
from proxy.stabilize.model import Facts, Form
from proxy.stabilize.names import Name
from proxy.stabilize.stabilizing import stabilize
from proxy.stabilize.template_facts import BODIES, inlined_body, keeps_inlined, read_facts
from tests.lab.clients.mutation import Body, Mutation
from tests.lab.models import TEMPLATE_FOLDER, model_path
from tests.lab.server import DEFAULT_MODEL_FOLDER, LlamaServer

Message = dict[str, Any]

TEMPLATES = ("plain", "thinking", "tools_first", "strict")
"""Two with the system text first, two with the tools first; of each, one that refuses late system
messages."""
SYSTEM_FIRST = ("plain", "thinking")
REFUSING = ("thinking", "strict")
DROPPING_REASONING = ("thinking", "tools_first", "strict")


def server_with(template: str) -> LlamaServer:
    """Return a server, not yet started, that renders with one of the lab's templates."""
    path = TEMPLATE_FOLDER / f"{template}.jinja"
    model = model_path("full", "tiny", DEFAULT_MODEL_FOLDER)
    arguments = ("--chat-template-file", str(path))
    return LlamaServer(model, n_slots=1, n_ctx=4096, extra_args=arguments)


def template_facts(server: LlamaServer) -> Facts:
    """Return what the server's template does with late system messages and old reasoning."""
    renderings = {probe: render(server, Form.CHAT, body) for probe, body in BODIES.items()}
    facts = read_facts(renderings)
    inlined = inlined_body(facts)
    if inlined is not None:
        assert keeps_inlined(render(server, Form.CHAT, inlined), renderings)
    return facts


def render(server: LlamaServer, form: Form, body: Body) -> str | None:
    """Return the prompt, or None if the template refuses the request."""
    chat = as_chat(body) if form is Form.ANTHROPIC else body
    status, reply = server.request("POST", "/apply-template", chat)
    if status == 200:
        return str(reply["prompt"])
    assert "Exception" in reply["error"]["message"], reply
    return None


def tokenize(server: LlamaServer, prompt: str) -> list[int]:
    body = {"content": prompt, "add_special": True, "parse_special": True}
    tokens: list[int] = server.request("POST", "/tokenize", body)[1]["tokens"]
    return tokens


def stabilized(mutation: Mutation, switches: frozenset[Name], facts: Facts) -> list[Body]:
    """Return the requests as they leave the proxy, each after it has seen those before."""
    memory = Memory()
    for made in mutation.calls_made:
        memory.remember_call(made.call_id, made.name, made.raw_arguments)
    bodies = []
    for body in mutation.requests:
        result = stabilize(mutation.form, body, memory, switches, facts)
        assert result.failures == ()
        memory.learn(result.lessons)
        bodies.append(result.body)
    return bodies


def kept_share(
    server: LlamaServer, mutation: Mutation, switches: frozenset[Name], facts: Facts
) -> float | None:
    """Return the share of a prompt that the next one begins with; None if one is refused."""
    older, newer = stabilized(mutation, switches, facts)[-2:]
    prompts = [render(server, mutation.form, body) for body in (older, newer)]
    if prompts[0] is None or prompts[1] is None:
        return None
    tokens = [token_ids(tokenize(server, _before_answer(prompt))) for prompt in prompts if prompt]
    n_kept = common_prefix_length(*tokens)
    return n_kept / len(tokens[1] if mutation.is_compaction else tokens[0])


def _before_answer(prompt: str) -> str:
    """Return a prompt without what only asks for the answer: templates reopen that differently."""
    return prompt[: prompt.rindex("<|im_start|>assistant")]


def as_chat(body: Body) -> Body:
    """Return an Anthropic body as llama-server converts it (server-chat.cpp), for what is used here."""
    texts = [_with_masked_nonce(block["text"]) for block in body["system"]]
    messages: list[Message] = [{"role": "system", "content": "".join(texts)}]
    for message in body["messages"]:
        messages += _chat_messages(message)
    return {"messages": messages, "tools": [_chat_tool(tool) for tool in body["tools"]]}


def _with_masked_nonce(text: str) -> str:
    if not text.startswith("x-anthropic-billing-header:") or "cch=" not in text:
        return text
    start = text.index("cch=") + 4
    return text[:start] + "fffff" + text[start + 5 :]


def _chat_messages(message: Message) -> Iterator[Message]:
    content = message["content"]
    if isinstance(content, str):
        yield message
        return
    texts = [block for block in content if block["type"] == "text"]
    calls = [_chat_call(block) for block in content if block["type"] == "tool_use"]
    reasoning = "".join(b["thinking"] for b in content if b["type"] == "thinking")
    if texts or calls or reasoning:
        more = {"tool_calls": calls, "reasoning_content": reasoning}
        given = {key: value for key, value in more.items() if value}
        yield {"role": message["role"], "content": texts or "", **given}
    for block in content:
        if block["type"] == "tool_result":
            result = block["content"]
            parts = [] if isinstance(result, str) else [p for p in result if p["type"] == "text"]
            joined = result if isinstance(result, str) else "".join(p["text"] for p in parts)
            yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": joined}


def _chat_call(block: Message) -> Message:
    arguments = json.dumps(block["input"], separators=(",", ":"), ensure_ascii=False)
    function = {"name": block["name"], "arguments": arguments}
    return {"id": block["id"], "type": "function", "function": function}


def _chat_tool(tool: Message) -> Message:
    function = {
        "name": tool["name"],
        "description": tool["description"],
        "parameters": tool["input_schema"],
    }
    return {"type": "function", "function": function}
