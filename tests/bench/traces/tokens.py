"""Asks llama-server for the tokens of what was sent, which evaluates nothing."""

from typing import Any

from proxy.core.messages import Route
from proxy.core.tokens import TokenIds, token_ids
from proxy.llama.conversions import chat_of_messages
from proxy.stabilize.model import Memory, Name
from proxy.stabilize.run import stabilize
from tests.bench.traces.exact import Exchange
from tests.bench.traces.play import Sent
from tests.bench.traces.trace import Request
from tests.lab.server import LlamaServer


def read_exchanges(server: LlamaServer, sent: list[Sent]) -> list[Exchange]:
    """Return prompts and answers in tokens, in the order of sending."""
    return [_read_exchange(server, one) for one in sent]


def _read_exchange(server: LlamaServer, sent: Sent) -> Exchange:
    prompt = _rendered(server, sent.request, sent.request.body(sent.answers))
    answer = sent.reply.text if sent.reply else ""
    return Exchange(_tokens(server, prompt), _tokens(server, prompt + answer))


def _rendered(server: LlamaServer, request: Request, body: dict[str, Any]) -> str:
    """Return a prompt as the client wrote it; folded where the template refuses it otherwise."""
    if request.form is Route.CHAT:
        return str(_post(server, "/apply-template", body)["prompt"])
    status, reply = server.request("POST", "/apply-template", chat_of_messages(body))
    if status == 200:
        return str(reply["prompt"])
    folded = stabilize(request.form, body, Memory(), {Name.FOLD_SYSTEM_MESSAGES}).body
    return str(_post(server, "/apply-template", chat_of_messages(folded))["prompt"])


def _tokens(server: LlamaServer, text: str) -> TokenIds:
    content = {"content": text, "add_special": True, "parse_special": True}
    return token_ids(_post(server, "/tokenize", content)["tokens"])


def _post(server: LlamaServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, reply = server.request("POST", path, body)
    if status != 200:
        raise RuntimeError(f"{path}: {reply}")
    return dict(reply)
