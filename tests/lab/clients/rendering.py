"""Prompts of clients' requests as tokens of a real llama-server, and how much of one another keeps.

Many requests leave the proxy as others do: llama-server is asked once about each.
"""

import json
from functools import cache

from proxy.core.messages import Route
from proxy.core.tokens import common_prefix_length, token_ids
from proxy.llama.conversions import chat_of_messages
from proxy.stabilize.model import Memory, Name, RequestFacts
from proxy.stabilize.run import BODIES, inlined_body, keeps_inlined, read_facts, stabilize
from tests.lab.clients.mutation import Body, Mutation
from tests.lab.models import TEMPLATE_FOLDER, model_path
from tests.lab.server import DEFAULT_MODEL_FOLDER, LlamaServer

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


def template_facts(server: LlamaServer) -> RequestFacts:
    """Return what the server's template does with late system messages and old reasoning."""
    renderings = {probe: render(server, Route.CHAT, body) for probe, body in BODIES.items()}
    facts = read_facts(renderings)
    inlined = inlined_body(facts)
    if inlined is not None:
        assert keeps_inlined(render(server, Route.CHAT, inlined), renderings)
    return facts


def render(server: LlamaServer, form: Route, body: Body) -> str | None:
    """Return the prompt, or None if the template refuses the request."""
    chat = chat_of_messages(body) if form is Route.MESSAGES else body
    return _rendered(server, json.dumps(chat))


@cache
def _rendered(server: LlamaServer, chat: str) -> str | None:
    status, reply = server.request("POST", "/apply-template", chat.encode())
    if status == 200:
        return str(reply["prompt"])
    assert "Exception" in reply["error"]["message"], reply
    return None


@cache
def tokenize(server: LlamaServer, prompt: str) -> list[int]:
    body = {"content": prompt, "add_special": True, "parse_special": True}
    tokens: list[int] = server.request("POST", "/tokenize", body)[1]["tokens"]
    return tokens


def stabilized(mutation: Mutation, switches: frozenset[Name], facts: RequestFacts) -> list[Body]:
    """Return the requests as they leave the proxy, each after it has seen those before."""
    memory = Memory()
    for made in mutation.calls_made:
        memory.remember_call(made.call_id, made.name, made.raw_arguments)
    bodies = []
    for body in mutation.requests:
        result = stabilize(mutation.form, body, memory, switches, facts)
        assert not result.failures
        memory.learn(result.lessons)
        bodies.append(result.body)
    return bodies


def kept_share(
    server: LlamaServer, mutation: Mutation, switches: frozenset[Name], facts: RequestFacts
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
