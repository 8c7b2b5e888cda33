"""Random tensors whose answers depend on the whole prompt and consist of chosen tokens only.

Owns the trick that makes this possible: no layer writes to the first two channels of the residual
stream.  Channel 0 holds the same value for every token; channel 1 holds that value after the end of
a line, otherwise 0.  Output rows that weigh them make a token's logit hopeless, or not.
"""

from __future__ import annotations

import math
import zlib
from functools import cache

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.lab.vocabulary import Vocabulary

# Small, so that the layers (which see the whole prompt) outweigh the last token.
EMBEDDING_SCALE = 0.5
N_RESERVED_CHANNELS = 2
# Larger tensors repeat so many values. The number is prime: no two rows are equal.
MOST_DRAWN = (1 << 22) - 3
# Matrices in Q8_0 repeat so many blocks of 32 values, from a place that depends on the name.
N_DRAWN_BLOCKS = 131_071
BLOCK_SIZE = 32
RESERVED_VALUE = 0.5
HOPELESS = -200.0
LOGIT_GAIN = 2.0


class TensorWriter:
    """Adds tensors to a GGUF file; each one's values depend only on its name and shape."""

    def __init__(self, writer: gguf.GGUFWriter, *, is_quantized: bool = False) -> None:
        self._writer = writer
        self._is_quantized = is_quantized

    def matrix(self, name: str, n_outputs: int, n_inputs: int, gain: float = 1.0) -> None:
        """Add a matrix that keeps the size of its input, times `gain`."""
        if self._is_quantized:
            self._add_quantized(name, n_outputs, n_inputs, gain)
        else:
            self._add_half(name, _draw(name, (n_outputs, n_inputs)) * gain / np.sqrt(n_inputs))

    def residual_matrix(self, name: str, n_outputs: int, n_inputs: int) -> None:
        """Add a matrix whose result is added to the residual stream."""
        if self._is_quantized:
            return self._add_quantized(name, n_outputs, n_inputs, is_residual=True)
        values = _draw(name, (n_outputs, n_inputs)) / np.sqrt(n_inputs)
        values[:N_RESERVED_CHANNELS] = 0.0
        self._add_half(name, values)

    def embedding(self, name: str, vocabulary: Vocabulary, n_embd: int, factor: float) -> None:
        """Add the token embedding, times `factor`."""
        values = _draw(name, (len(vocabulary.tokens), n_embd)) * EMBEDDING_SCALE
        values[:, 0] = RESERVED_VALUE
        values[:, 1] = 0.0
        values[vocabulary.line_end_ids(), 1] = RESERVED_VALUE
        self._add_half(name, values * factor)

    def output(self, name: str, vocabulary: Vocabulary, n_embd: int) -> None:
        """Add the output matrix: first words after a line end, further words elsewhere."""
        values = np.zeros((len(vocabulary.tokens), n_embd))
        values[:, 0] = HOPELESS
        for token_ids, reserved in (
            (vocabulary.first_word_ids(), (HOPELESS, -HOPELESS)),
            (vocabulary.further_word_ids(), (0.0, HOPELESS)),
        ):
            rows = _draw(f"{name}{reserved}", (len(token_ids), n_embd))
            values[token_ids] = rows * LOGIT_GAIN / np.sqrt(n_embd)
            values[token_ids, :N_RESERVED_CHANNELS] = reserved
        self._add_half(name, values)

    def small_matrix(self, name: str, n_outputs: int, n_inputs: int, gain: float = 1.0) -> None:
        """Add a matrix in full precision, as convolutions need it."""
        self.values(name, _draw(name, (n_outputs, n_inputs)) * gain / np.sqrt(n_inputs))

    def heads(self, name: str, n_heads: int, n_outputs: int, n_inputs: int) -> None:
        """Add one matrix for each head, in full precision."""
        self.values(name, _draw(name, (n_heads, n_outputs, n_inputs)) / np.sqrt(n_inputs))

    def constant(self, name: str, size: int, value: float = 1.0) -> None:
        """Add a vector of one value, as for norms."""
        self.values(name, np.full(size, value))

    def values(self, name: str, values: NDArray[np.float64]) -> None:
        """Add exactly these values, in full precision."""
        self._writer.add_tensor(name, values.astype(np.float32))

    def _add_quantized(
        self,
        name: str,
        n_outputs: int,
        n_inputs: int,
        gain: float = 1.0,
        *,
        is_residual: bool = False,
    ) -> None:
        blocks = np.roll(_drawn_blocks(), zlib.crc32(name.encode()) % N_DRAWN_BLOCKS, axis=0)
        scales = blocks[:, :2].view(np.float16) * (gain / np.sqrt(n_inputs))
        blocks[:, :2] = scales.astype(np.float16).view(np.uint8)
        rows = np.resize(blocks, (n_outputs, n_inputs // BLOCK_SIZE * blocks.shape[1]))
        if is_residual:
            rows[:N_RESERVED_CHANNELS] = 0
        self._writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType.Q8_0)

    def _add_half(self, name: str, values: NDArray[np.float64]) -> None:
        self._writer.add_tensor(name, values.astype(np.float16))


def _draw(name: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    draws = np.random.default_rng(zlib.crc32(name.encode()))
    if math.prod(shape) <= MOST_DRAWN:
        return draws.standard_normal(shape)
    return np.resize(draws.standard_normal(MOST_DRAWN), shape)


@cache
def _drawn_blocks() -> NDArray[np.uint8]:
    """Return normally distributed values as Q8_0: a scale of two bytes and a byte for each value."""
    values = _draw("blocks", (N_DRAWN_BLOCKS, BLOCK_SIZE)).astype(np.float32)
    return gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
