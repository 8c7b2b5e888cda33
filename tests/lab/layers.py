"""The layer types that the lab's architectures are put together from.

Each function adds the tensors of one layer part; names and shapes are the ones that llama.cpp
expects.  Knows nothing about files, vocabularies or which architecture has which layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.lab.weights import TensorWriter

# Queries and keys this large make attention pick few tokens instead of averaging all of them away.
ATTENTION_GAIN = 2.0
CONVOLUTION_WIDTH = 4
# Small steps: together with the decay rates below, a state remembers thousands of tokens.
STEP_BIAS = -4.0


@dataclass(frozen=True)
class Shape:
    """The sizes of one model."""

    n_layers: int
    n_embd: int
    n_ff: int
    n_heads: int
    n_kv_heads: int
    head_size: int
    state_size: int
    is_quantized: bool = False
    """Whether large matrices are Q8_0, otherwise halves."""


def add_feed_forward(tensors: TensorWriter, block: str, shape: Shape) -> None:
    """Add a gated feed-forward part (its norm is the caller's)."""
    tensors.matrix(f"{block}.ffn_gate.weight", shape.n_ff, shape.n_embd)
    tensors.matrix(f"{block}.ffn_up.weight", shape.n_ff, shape.n_embd)
    tensors.residual_matrix(f"{block}.ffn_down.weight", shape.n_embd, shape.n_ff)


def add_attention(
    tensors: TensorWriter, block: str, shape: Shape, has_head_norms: bool, has_gate: bool = False
) -> None:
    """Add full or sliding-window attention, optionally with query/key norms and an output gate."""
    query_size = shape.n_heads * shape.head_size
    key_size = shape.n_kv_heads * shape.head_size
    # Where there are norms, they set the size of queries and keys.
    gain = 1.0 if has_head_norms else ATTENTION_GAIN
    n_query_rows = query_size * 2 if has_gate else query_size
    tensors.matrix(f"{block}.attn_q.weight", n_query_rows, shape.n_embd, gain)
    tensors.matrix(f"{block}.attn_k.weight", key_size, shape.n_embd, gain)
    tensors.matrix(f"{block}.attn_v.weight", key_size, shape.n_embd)
    tensors.residual_matrix(f"{block}.attn_output.weight", shape.n_embd, query_size)
    if has_head_norms:
        tensors.constant(f"{block}.attn_q_norm.weight", shape.head_size, ATTENTION_GAIN)
        tensors.constant(f"{block}.attn_k_norm.weight", shape.head_size, ATTENTION_GAIN)


def add_mamba2(tensors: TensorWriter, block: str, shape: Shape) -> None:
    """Add a Mamba-2 mixer with one group, twice as wide as the residual stream."""
    inner_size = 2 * shape.n_embd
    n_heads = 2 * shape.n_heads
    convolved_size = inner_size + 2 * shape.state_size
    tensors.matrix(f"{block}.ssm_in.weight", inner_size + convolved_size + n_heads, shape.n_embd)
    tensors.small_matrix(f"{block}.ssm_conv1d.weight", convolved_size, CONVOLUTION_WIDTH)
    tensors.constant(f"{block}.ssm_conv1d.bias", convolved_size, 0.0)
    tensors.constant(f"{block}.ssm_dt.bias", n_heads, STEP_BIAS)
    tensors.values(f"{block}.ssm_a", _decay_rates(n_heads).reshape(n_heads, 1))
    tensors.values(f"{block}.ssm_d", np.ones((n_heads, 1)))
    tensors.values(f"{block}.ssm_norm.weight", np.ones((1, inner_size)))
    tensors.residual_matrix(f"{block}.ssm_out.weight", shape.n_embd, inner_size)


def add_delta_net(tensors: TensorWriter, block: str, shape: Shape) -> None:
    """Add a gated delta net with as many key heads as value heads."""
    value_size = shape.n_heads * shape.state_size
    tensors.matrix(f"{block}.attn_qkv.weight", 3 * value_size, shape.n_embd)
    tensors.matrix(f"{block}.attn_gate.weight", value_size, shape.n_embd)
    tensors.small_matrix(f"{block}.ssm_conv1d.weight", 3 * value_size, CONVOLUTION_WIDTH)
    tensors.constant(f"{block}.ssm_dt.bias", shape.n_heads, STEP_BIAS)
    tensors.values(f"{block}.ssm_a", _decay_rates(shape.n_heads))
    tensors.matrix(f"{block}.ssm_beta.weight", shape.n_heads, shape.n_embd)
    tensors.matrix(f"{block}.ssm_alpha.weight", shape.n_heads, shape.n_embd)
    tensors.constant(f"{block}.ssm_norm.weight", shape.state_size)
    tensors.residual_matrix(f"{block}.ssm_out.weight", shape.n_embd, value_size)


def _decay_rates(n_heads: int) -> NDArray[np.float64]:
    # Some heads forget soon, others hardly ever.
    return -np.geomspace(1.0, 0.003, n_heads)
