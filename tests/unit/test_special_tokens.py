"""Which tokens are taken for special ones, by their text, and what is made of them."""

import asyncio
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest

from proxy.core.tokens import TokenIds, token_ids
from proxy.llama.client import TokenPiece
from proxy.serving.prompts import KnownTexts, _is_special
from tests.unit.builders import NAMESPACE

SPECIAL = [
    "<|im_start|>",
    "[INST]",
    "</s>",
    "<｜User｜>",
    "<start_of_turn>",
    "<|START_OF_TURN_TOKEN|>",
]
ORDINARY = ["}_{", " ...", "(name", "name)", "[0]", "\n", "'s", "==", [226, 128]]
HINDI = ["ाने", "ियों"]
"""Letters between vowel signs."""


@pytest.mark.parametrize("piece", [*SPECIAL, *ORDINARY, *HINDI])
def test_letters_between_signs_are_special(piece: str | list[int]) -> None:
    assert _is_special(TokenPiece(7, piece)) == (piece in SPECIAL)


async def test_text_that_was_being_read_when_splicing_proved_wrong_is_not_spliced_from() -> None:
    is_asked, may_answer = asyncio.Event(), asyncio.Event()

    def cut(text: str) -> list[TokenPiece]:
        return [TokenPiece(ord(p[0]) + len(p), p) for p in re.findall(r"<\|x\|>|.", text)]

    async def tokenize(text: str, _: Any, **how: bool) -> TokenIds:
        return token_ids(piece.id for piece in cut(text))

    async def pieces(text: str, _: Any, **how: bool) -> list[TokenPiece]:
        is_asked.set()
        await may_answer.wait()
        return cut(text)

    known = KnownTexts(cast(Any, SimpleNamespace(tokenize=tokenize, pieces=pieces)))
    reading = asyncio.ensure_future(known.tokenize("<|x|>one<|x|>two", {}, NAMESPACE))
    await is_asked.wait()
    assert await known.was_wrong("one", token_ids([1]), {})
    may_answer.set()
    await reading
    await known.tokenize("<|x|>one<|x|>two<|x|>three", {}, NAMESPACE)
    assert not known.n_spliced
