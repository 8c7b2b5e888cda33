"""Which tokens are taken for special ones, by their text."""

import pytest

from proxy.llama.client import TokenPiece
from proxy.serving.prompts import _is_special

SPECIAL = [
    "<|im_start|>",
    "[INST]",
    "</s>",
    "<｜User｜>",
    "<start_of_turn>",
    "<|START_OF_TURN_TOKEN|>",
]
ORDINARY = ["}_{", " ...", "(name", "name)", "[0]", "\n", "'s", "==", [226, 128]]


@pytest.mark.parametrize("piece", [*SPECIAL, *ORDINARY])
def test_letters_between_signs_are_special(piece: str | list[int]) -> None:
    assert _is_special(TokenPiece(7, piece)) == (piece in SPECIAL)
