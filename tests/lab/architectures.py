"""The kinds of model, one per way in which llama-server remembers a prompt, and one that drafts.

Each function writes the hyperparameters and the layers of one architecture.  Knows nothing about
the vocabulary, the chat template or the file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import gguf

from tests.lab.layers import (
    ATTENTION_GAIN,
    CONVOLUTION_WIDTH,
    Shape,
    add_attention,
    add_delta_net,
    add_feed_forward,
    add_mamba2,
)
from tests.lab.weights import TensorWriter

N_CONTEXT = 131072
SLIDING_WINDOW = 512
# Every fourth layer of a hybrid model is attention, the others are recurrent.
ATTENTION_INTERVAL = 4
NORM_EPSILON = 1e-6
# This norm also lifts the rounding errors of attention; at full size, near ties would be decided by
# them in every tenth answer.
POST_ATTENTION_SCALE = 0.3
# An index picks so many tokens; its keys are as long as those of the real models.
N_PICKED = 64
INDEX_SIZE = 128
# With few heads many scores would be exactly 0, and which of them are picked is chance.
N_INDEX_HEADS = 16
COMPRESSED_WINDOW = 128
# Not as long as other keys, or llama-server divides by zero.
COMPRESSED_INDEX_SIZE = 64
SPARSE_RATIO = 4
COMPRESSION_RATIOS = (0, SPARSE_RATIO, 128, SPARSE_RATIO)

WriteArchitecture = Callable[[gguf.GGUFWriter, TensorWriter, Shape], None]


def write_full(writer: gguf.GGUFWriter, tensors: TensorWriter, shape: Shape) -> None:
    """Write `llama`: full attention in every layer."""
    _write_common(writer, shape)
    _write_attention(writer, shape)
    for layer in range(shape.n_layers):
        block = f"blk.{layer}"
        tensors.constant(f"{block}.attn_norm.weight", shape.n_embd)
        add_attention(tensors, block, shape, has_head_norms=False)
        tensors.constant(f"{block}.ffn_norm.weight", shape.n_embd)
        add_feed_forward(tensors, block, shape)


def write_swa(writer: gguf.GGUFWriter, tensors: TensorWriter, shape: Shape) -> None:
    """Write `gemma3`: sliding-window attention, with a full attention layer now and then."""
    _write_common(writer, shape)
    _write_attention(writer, shape)
    writer.add_sliding_window(SLIDING_WINDOW)
    writer.add_sliding_window_pattern(2)
    for layer in range(shape.n_layers):
        block = f"blk.{layer}"
        tensors.constant(f"{block}.attn_norm.weight", shape.n_embd)
        add_attention(tensors, block, shape, has_head_norms=True)
        tensors.constant(f"{block}.post_attention_norm.weight", shape.n_embd, POST_ATTENTION_SCALE)
        tensors.constant(f"{block}.ffn_norm.weight", shape.n_embd)
        add_feed_forward(tensors, block, shape)
        tensors.constant(f"{block}.post_ffw_norm.weight", shape.n_embd)


def write_recurrent(writer: gguf.GGUFWriter, tensors: TensorWriter, shape: Shape) -> None:
    """Write `mamba2`: a fixed-size state and no attention."""
    _write_common(writer, shape)
    _write_mamba2(writer, shape)
    for layer in range(shape.n_layers):
        block = f"blk.{layer}"
        tensors.constant(f"{block}.attn_norm.weight", shape.n_embd)
        add_mamba2(tensors, block, shape)


def write_hybrid(
    writer: gguf.GGUFWriter, tensors: TensorWriter, shape: Shape, n_drafting: int = 0
) -> None:
    """Write `qwen35`: gated delta nets and gated attention with M-RoPE positions."""
    _write_common(writer, shape, n_drafting)
    _write_attention(writer, shape)
    writer.add_rope_dimension_sections(_split_rope_pairs(shape.head_size // 2))
    writer.add_full_attention_interval(_attention_interval(shape))
    writer.add_ssm_conv_kernel(CONVOLUTION_WIDTH)
    writer.add_ssm_inner_size(shape.n_heads * shape.state_size)
    writer.add_ssm_state_size(shape.state_size)
    writer.add_ssm_time_step_rank(shape.n_heads)
    writer.add_ssm_group_count(shape.n_heads)
    for layer in range(shape.n_layers):
        block = f"blk.{layer}"
        tensors.constant(f"{block}.attn_norm.weight", shape.n_embd)
        if _is_attention(layer, shape):
            add_attention(tensors, block, shape, has_head_norms=True, has_gate=True)
        else:
            add_delta_net(tensors, block, shape)
        tensors.constant(f"{block}.post_attention_norm.weight", shape.n_embd)
        add_feed_forward(tensors, block, shape)


def write_hybrid_mtp(writer: gguf.GGUFWriter, tensors: TensorWriter, shape: Shape) -> None:
    """Write `qwen35` with a layer behind the others that drafts the token after the next one."""
    write_hybrid(writer, tensors, shape, n_drafting=1)
    writer.add_nextn_predict_layers(1)
    block, n_embd = f"blk.{shape.n_layers}", shape.n_embd
    tensors.constant(f"{block}.attn_norm.weight", n_embd)
    add_attention(tensors, block, shape, has_head_norms=True, has_gate=True)
    tensors.constant(f"{block}.post_attention_norm.weight", n_embd)
    add_feed_forward(tensors, block, shape)
    tensors.matrix(f"{block}.nextn.eh_proj.weight", n_embd, 2 * n_embd)
    tensors.constant(f"{block}.nextn.enorm.weight", n_embd)
    tensors.constant(f"{block}.nextn.hnorm.weight", n_embd)


def write_hybrid_no_mrope(writer: gguf.GGUFWriter, tensors: TensorWriter, shape: Shape) -> None:
    """Write `granitehybrid`: Mamba-2 and attention, with one position per token."""
    _write_common(writer, shape)
    _write_attention_heads(writer, shape)
    _write_mamba2(writer, shape)
    # A layer without key/value heads is a recurrent one.
    layers = range(shape.n_layers)
    writer.add_head_count_kv([shape.n_kv_heads if _is_attention(i, shape) else 0 for i in layers])
    for layer in layers:
        block = f"blk.{layer}"
        tensors.constant(f"{block}.attn_norm.weight", shape.n_embd)
        if _is_attention(layer, shape):
            add_attention(tensors, block, shape, has_head_norms=False)
        else:
            add_mamba2(tensors, block, shape)
        tensors.constant(f"{block}.ffn_norm.weight", shape.n_embd)
        add_feed_forward(tensors, block, shape)


def write_sparse(
    writer: gguf.GGUFWriter, tensors: TensorWriter, shape: Shape, windowed: Collection[int] = ()
) -> None:
    """Write `glm-dsa`: each token attends to the few that an index picks, which has a cache of its own."""
    nope_size = rope_size = latent_size = shape.head_size
    _write_common(writer, shape)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(1)
    writer.add_key_length(latent_size + rope_size)
    writer.add_value_length(latent_size)
    writer.add_key_length_mla(nope_size + rope_size)
    writer.add_value_length_mla(shape.head_size)
    writer.add_rope_dimension_count(rope_size)
    writer.add_q_lora_rank(latent_size)
    writer.add_kv_lora_rank(latent_size)
    writer.add_indexer_head_count(shape.n_heads)
    writer.add_indexer_key_length(INDEX_SIZE)
    writer.add_indexer_top_k(N_PICKED)
    writer.add_leading_dense_block_count(shape.n_layers)
    writer.add_expert_feed_forward_length(shape.n_ff)
    writer.add_expert_shared_count(1)
    for layer in range(shape.n_layers):
        block = f"blk.{layer}"
        for norm in ("attn_q_a_norm", "attn_kv_a_norm"):
            tensors.constant(f"{block}.{norm}.weight", latent_size, ATTENTION_GAIN)
        for norm in ("attn_norm", "ffn_norm"):
            tensors.constant(f"{block}.{norm}.weight", shape.n_embd)
        key_size, value_size = nope_size + rope_size, shape.n_heads * shape.head_size
        tensors.matrix(f"{block}.attn_q_a.weight", latent_size, shape.n_embd)
        tensors.matrix(f"{block}.attn_q_b.weight", shape.n_heads * key_size, latent_size)
        tensors.matrix(f"{block}.attn_kv_a_mqa.weight", latent_size + rope_size, shape.n_embd)
        tensors.heads(f"{block}.attn_k_b.weight", shape.n_heads, latent_size, nope_size)
        tensors.heads(f"{block}.attn_v_b.weight", shape.n_heads, shape.head_size, latent_size)
        tensors.residual_matrix(f"{block}.attn_output.weight", shape.n_embd, value_size)
        add_feed_forward(tensors, block, shape)
        if windowed:
            tensors.constant(f"{block}.attn_k_norm.weight", rope_size, ATTENTION_GAIN)
            tensors.matrix(f"{block}.attn_gate.weight", shape.n_heads, shape.n_embd)
        if layer in windowed:
            continue
        index_size = shape.n_heads * INDEX_SIZE
        tensors.constant(f"{block}.indexer.k_norm.weight", INDEX_SIZE)
        tensors.constant(f"{block}.indexer.k_norm.bias", INDEX_SIZE, 0.0)
        tensors.small_matrix(f"{block}.indexer.proj.weight", shape.n_heads, shape.n_embd)
        tensors.matrix(f"{block}.indexer.attn_k.weight", INDEX_SIZE, shape.n_embd)
        tensors.matrix(f"{block}.indexer.attn_q_b.weight", index_size, latent_size)


def write_sparse_window(writer: gguf.GGUFWriter, tensors: TensorWriter, shape: Shape) -> None:
    """Write `dots3note`: sparse attention in every other layer, a sliding window in the others."""
    name, is_windowed = writer.arch, [layer % 2 == 0 for layer in range(shape.n_layers)]
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_sliding_window(SLIDING_WINDOW)
    writer.add_sliding_window_pattern(is_windowed)
    writer.add_rope_freq_base_swa(10_000.0)
    writer.add_key_length_swa(2 * shape.head_size)
    writer.add_value_length_swa(shape.head_size)
    writer.add_uint32(f"{name}.attention.key_length_mla_swa", 2 * shape.head_size)
    writer.add_uint32(f"{name}.attention.value_length_mla_swa", shape.head_size)
    writer.add_uint32(f"{name}.attention.kv_lora_rank_swa", shape.head_size)
    writer.add_array(f"{name}.attention.indexer.types", [not each for each in is_windowed])
    write_sparse(writer, tensors, shape, [i for i, each in enumerate(is_windowed) if each])


def write_compressed(writer: gguf.GGUFWriter, tensors: TensorWriter, shape: Shape) -> None:
    """Write `deepseek4`: a window, and older keys compressed by 4, of which an index picks, or by 128."""
    n_embd, n_streams = shape.n_embd, 4
    latent_size, head_size = 2 * shape.head_size, 4 * shape.head_size
    ratios = [COMPRESSION_RATIOS[i % len(COMPRESSION_RATIOS)] for i in range(shape.n_layers)]
    _write_common(writer, shape)
    _write_compression(writer, shape, n_streams, head_size, ratios)
    n_mixed = n_streams * (n_streams + 2)
    _add_mixer(tensors, "output_hc", n_streams, n_streams * n_embd, 1)
    for layer, ratio in enumerate(ratios):
        block = f"blk.{layer}"
        for norm in ("attn_norm", "ffn_norm"):
            tensors.constant(f"{block}.{norm}.weight", n_embd)
        tensors.constant(f"{block}.attn_sinks.weight", shape.n_heads, 0.0)
        tensors.constant(f"{block}.attn_q_a_norm.weight", latent_size)
        tensors.constant(f"{block}.attn_kv_a_norm.weight", head_size, ATTENTION_GAIN)
        tensors.matrix(f"{block}.attn_q_a.weight", latent_size, n_embd)
        tensors.matrix(f"{block}.attn_q_b.weight", shape.n_heads * head_size, latent_size)
        tensors.matrix(f"{block}.attn_kv.weight", head_size, n_embd)
        tensors.matrix(f"{block}.attn_output_a.weight", latent_size, shape.n_heads * head_size)
        tensors.residual_matrix(f"{block}.attn_output_b.weight", n_embd, latent_size)
        if ratio == SPARSE_RATIO:
            _add_compressor(tensors, f"{block}.attn", n_embd, head_size, ratio, n_overlapping=2)
            _add_compressor(
                tensors, f"{block}.indexer", n_embd, COMPRESSED_INDEX_SIZE, ratio, n_overlapping=2
            )
            tensors.matrix(f"{block}.indexer.proj.weight", N_INDEX_HEADS, n_embd)
            index_size = N_INDEX_HEADS * COMPRESSED_INDEX_SIZE
            tensors.matrix(f"{block}.indexer.attn_q_b.weight", index_size, latent_size)
        elif ratio:
            _add_compressor(tensors, f"{block}.attn", n_embd, head_size, ratio)
        for part in ("attn", "ffn"):
            _add_mixer(tensors, f"{block}.hc_{part}", n_mixed, n_streams * n_embd, 3)
        tensors.small_matrix(f"{block}.ffn_gate_inp.weight", 1, n_embd)
        tensors.constant(f"{block}.exp_probs_b.bias", 1, 0.0)
        for experts in ("exps", "shexp"):
            tensors.matrix(f"{block}.ffn_gate_{experts}.weight", shape.n_ff, n_embd)
            tensors.matrix(f"{block}.ffn_up_{experts}.weight", shape.n_ff, n_embd)
            tensors.residual_matrix(f"{block}.ffn_down_{experts}.weight", n_embd, shape.n_ff)


def _write_compression(
    writer: gguf.GGUFWriter, shape: Shape, n_streams: int, head_size: int, ratios: list[int]
) -> None:
    # gguf does not know this architecture yet.
    name = writer.arch
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(1)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_sliding_window(COMPRESSED_WINDOW)
    writer.add_q_lora_rank(head_size // 2)
    writer.add_expert_count(1)
    writer.add_expert_used_count(1)
    writer.add_expert_feed_forward_length(shape.n_ff)
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_scale(1.0)
    writer.add_expert_weights_norm(True)
    writer.add_uint32(f"{name}.expert_gating_func", 4)
    writer.add_float32(f"{name}.swiglu_clamp_exp", 10.0)
    writer.add_indexer_head_count(N_INDEX_HEADS)
    writer.add_indexer_key_length(COMPRESSED_INDEX_SIZE)
    writer.add_indexer_top_k(N_PICKED)
    writer.add_uint32(f"{name}.attention.output_group_count", 1)
    writer.add_uint32(f"{name}.attention.output_lora_rank", head_size // 2)
    writer.add_float32(f"{name}.attention.compress_rope_freq_base", 160_000.0)
    writer.add_array(f"{name}.attention.compress_ratios", ratios)
    writer.add_uint32(f"{name}.hyper_connection.count", n_streams)
    writer.add_uint32(f"{name}.hyper_connection.sinkhorn_iterations", 5)
    writer.add_float32(f"{name}.hyper_connection.epsilon", NORM_EPSILON)
    writer.add_uint32(f"{name}.hash_layer_count", 0)


def _add_compressor(
    tensors: TensorWriter, part: str, n_embd: int, size: int, ratio: int, n_overlapping: int = 1
) -> None:
    for matrix in ("kv", "gate"):
        tensors.matrix(f"{part}_compressor_{matrix}.weight", n_overlapping * size, n_embd)
    tensors.small_matrix(f"{part}_compressor_ape.weight", ratio, n_overlapping * size)
    tensors.constant(f"{part}_compressor_norm.weight", size, ATTENTION_GAIN)


def _add_mixer(
    tensors: TensorWriter, name: str, n_outputs: int, n_inputs: int, n_scales: int
) -> None:
    tensors.small_matrix(f"{name}_fn.weight", n_outputs, n_inputs)
    tensors.constant(f"{name}_base.weight", n_outputs, 0.0)
    tensors.constant(f"{name}_scale.weight", n_scales, 0.3)


def _split_rope_pairs(n_pairs: int) -> list[int]:
    # M-RoPE divides the rotated pairs between three coordinates; the fourth is unused.
    third = n_pairs // 3
    return [n_pairs - 2 * third, third, third, 0]


def _attention_interval(shape: Shape) -> int:
    return min(ATTENTION_INTERVAL, shape.n_layers)


def _is_attention(layer: int, shape: Shape) -> bool:
    return (layer + 1) % _attention_interval(shape) == 0


def _write_common(writer: gguf.GGUFWriter, shape: Shape, n_drafting: int = 0) -> None:
    writer.add_context_length(N_CONTEXT)
    writer.add_block_count(shape.n_layers + n_drafting)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_layer_norm_rms_eps(NORM_EPSILON)


def _write_attention(writer: gguf.GGUFWriter, shape: Shape) -> None:
    _write_attention_heads(writer, shape)
    writer.add_head_count_kv(shape.n_kv_heads)


def _write_attention_heads(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_head_count(shape.n_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_rope_freq_base(1_000_000.0)


def _write_mamba2(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_ssm_conv_kernel(CONVOLUTION_WIDTH)
    writer.add_ssm_inner_size(2 * shape.n_embd)
    writer.add_ssm_state_size(shape.state_size)
    writer.add_ssm_time_step_rank(2 * shape.n_heads)
    writer.add_ssm_group_count(1)
