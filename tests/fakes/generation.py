"""Answers of the scripted llama-server: what it generates, and how each API tells it."""

import json
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tests.fakes import tokenizer

DEFAULT_N_PREDICT = 4
MS_PER_TOKEN = 2.0


class Shape(StrEnum):
    """Which API an answer is written for."""

    NATIVE = "native"
    OPENAI_TEXT = "openai text"
    CHAT = "chat"
    ANTHROPIC = "anthropic"


PATHS = {
    "/completion": Shape.NATIVE,
    "/completions": Shape.NATIVE,
    "/v1/completions": Shape.OPENAI_TEXT,
    "/chat/completions": Shape.CHAT,
    "/api/chat": Shape.CHAT,
    "/v1/chat/completions": Shape.CHAT,
    "/v1/messages": Shape.ANTHROPIC,
}


def n_predict(body: dict[str, Any]) -> int:
    """Return how many tokens are sampled: 0 still samples one."""
    wanted = body.get("n_predict", body.get("max_tokens", DEFAULT_N_PREDICT))
    return max(1, int(wanted))


def generate(prompt: list[int], n_tokens: int) -> list[str]:
    """Return the pieces that always follow *prompt*."""
    seed = zlib.crc32(array("i", prompt).tobytes()) % 1000
    return [f" w{seed + i}" for i in range(n_tokens)]


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished generation."""

    slot_id: int
    n_prompt: int
    n_reused: int
    pieces: list[str]
    has_probabilities: bool = False

    def tokens_decoded(self, n_sampled: int) -> list[int]:
        """Return what the slot holds behind the prompt: the last sampled token is never decoded."""
        sampled = self.pieces[:n_sampled]
        return [tokenizer.token_id(piece) for piece in sampled[:-1]]

    @property
    def timings(self) -> dict[str, Any]:
        n_evaluated = self.n_prompt - self.n_reused
        return {
            "cache_n": self.n_reused,
            "prompt_n": n_evaluated,
            "prompt_ms": MS_PER_TOKEN * n_evaluated,
            "predicted_n": len(self.pieces),
            "predicted_ms": MS_PER_TOKEN * len(self.pieces),
        }

    @property
    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.n_prompt,
            "completion_tokens": len(self.pieces),
            "prompt_tokens_details": {"cached_tokens": self.n_reused},
        }

    def whole(self, shape: Shape) -> dict[str, Any]:
        """Return the answer of a request that does not stream."""
        text = "".join(self.pieces)
        match shape:
            case Shape.NATIVE:
                return {"content": text, **self._native_end()}
            case Shape.OPENAI_TEXT:
                return {"choices": [{"text": text}], "usage": self.usage, "timings": self.timings}
            case Shape.CHAT:
                message = {"role": "assistant", "content": text}
                choices = [{"message": message, "finish_reason": "length"}]
                return {"choices": choices, "usage": self.usage, "timings": self.timings}
            case Shape.ANTHROPIC:
                content = [{"type": "text", "text": text}]
                return {"type": "message", "content": content, "usage": self._anthropic_usage()}

    def events(self, shape: Shape) -> Iterator[bytes]:
        """Yield the events of a stream, one for each piece and one at the end."""
        match shape:
            case Shape.NATIVE:
                yield from (_event({"content": p, "stop": False}) for p in self.pieces)
                yield _event({"content": "", **self._native_end()})
            case Shape.ANTHROPIC:
                start = {"type": "message_start", "message": {"usage": self._anthropic_usage()}}
                yield _event(start)
                yield from (_event({"type": "content_block_delta", "text": p}) for p in self.pieces)
                yield _event({"type": "message_stop"})
            case _:
                yield from (_event({"choices": [{"delta": {"content": p}}]}) for p in self.pieces)
                yield _event({"choices": [], "timings": self.timings})
                yield b"data: [DONE]\n\n"

    def _native_end(self) -> dict[str, Any]:
        end = {"stop": True, "id_slot": self.slot_id, "timings": self.timings}
        if self.has_probabilities:
            likely = [{"id": 1000 + i, "logprob": -1.0 - i} for i in range(10)]
            end["completion_probabilities"] = [{**likely[0], "top_logprobs": likely}]
        return end

    def _anthropic_usage(self) -> dict[str, int]:
        return {
            "input_tokens": self.n_prompt - self.n_reused,
            "cache_read_input_tokens": self.n_reused,
            "output_tokens": len(self.pieces),
        }


def _event(data: dict[str, Any]) -> bytes:
    # Without spaces, as llama-server writes them.
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
