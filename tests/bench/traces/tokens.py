"""Asks llama-server for the tokens of what was sent, which evaluates nothing."""

from typing import Any

from proxy.core.prefix import TokenIds, token_ids
from tests.bench.traces.exact import Exchange
from tests.bench.traces.play import Sent
from tests.lab.server import LlamaServer


def read_exchanges(server: LlamaServer, sent: list[Sent]) -> list[Exchange]:
    """Return prompts and answers in tokens, in the order of sending."""
    return [_read_exchange(server, one) for one in sent]


def _read_exchange(server: LlamaServer, sent: Sent) -> Exchange:
    prompt = _post(server, "/apply-template", sent.request.body(sent.answers))["prompt"]
    answer = sent.reply.text if sent.reply else ""
    return Exchange(_tokens(server, prompt), _tokens(server, prompt + answer))


def _tokens(server: LlamaServer, text: str) -> TokenIds:
    content = {"content": text, "add_special": True, "parse_special": True}
    return token_ids(_post(server, "/tokenize", content)["tokens"])


def _post(server: LlamaServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, reply = server.request("POST", path, body)
    if status != 200:
        raise RuntimeError(f"{path}: {reply}")
    return dict(reply)
