"""A vocabulary of words and a ChatML template: enough for prompts to have a text, tokens and cuts."""

import json
import re
import zlib
from typing import Any

N_VOCAB = 32_000
BOS = 1
_FIRST_WORD = 100
_PIECES = re.compile(r"<\|\w+\|>| ?[^\s<]+|\s|<")


def pieces(text: str) -> list[str]:
    """Return *text* in pieces: a special token, a word with the space before it, or a lone space."""
    return _PIECES.findall(text)


def token_id(piece: str) -> int:
    return _FIRST_WORD + zlib.crc32(piece.encode()) % (N_VOCAB - _FIRST_WORD)


def tokenize(text: str) -> list[int]:
    """Return the tokens of a prompt: BOS, then one for each piece."""
    return [BOS, *map(token_id, pieces(text))]


def tokenize_parts(content: Any, *, add_special: bool) -> list[int]:
    """Return the tokens of /tokenize: BOS only before text, and only if asked for."""
    parts = content if isinstance(content, list) else [content]
    tokens = [BOS] if add_special and parts and isinstance(parts[0], str) else []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
        else:
            tokens += map(token_id, pieces(part))
    return tokens


def render(body: dict[str, Any], *, has_generation_prompt: bool = True) -> str:
    """Return the prompt of a chat body."""
    text = ""
    if body.get("tools"):
        text += f"<|im_start|>tools\n{json.dumps(body['tools'])}<|im_end|>\n"
    for message in body["messages"]:
        text += f"<|im_start|>{message['role']}\n{_content(message)}<|im_end|>\n"
    if has_generation_prompt and body.get("add_generation_prompt", True):
        text += "<|im_start|>assistant\n"
    return text


def _content(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(str(part["text"]) for part in content)


def from_anthropic(body: dict[str, Any]) -> dict[str, Any]:
    """Return the chat body that an Anthropic one is converted to."""
    system = [{"role": "system", "content": body["system"]}] if "system" in body else []
    return {"messages": [*system, *body["messages"]]}
