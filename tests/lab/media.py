"""A tiny image encoder for the lab's models, and images for it."""

import base64
import struct
import zlib
from pathlib import Path

import gguf
import numpy as np

from tests.lab.models import SIZES

_PATCH_PIXELS, _N_PATCHES = 14, 4
"""An image of 28 x 28 pixels takes four tokens."""
_N_EMBD, _N_FF, _N_HEADS = 32, 64, 2


def build_projector(path: Path) -> Path:
    """Write what --mmproj names for small models: one layer of `clip`, and llava's two matrices."""
    writer, random = gguf.GGUFWriter(path, "clip"), np.random.default_rng(1)
    n_text, side = SIZES["least"].n_embd, int(_N_PATCHES**0.5)
    writer.add_type("mmproj")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_clip_has_vision_encoder(True)
    writer.add_string("clip.projector_type", "mlp")
    writer.add_vision_use_gelu(True)
    writer.add_vision_image_size(side * _PATCH_PIXELS)
    writer.add_vision_patch_size(_PATCH_PIXELS)
    writer.add_vision_embedding_length(_N_EMBD)
    writer.add_vision_feed_forward_length(_N_FF)
    writer.add_vision_projection_dim(n_text)
    writer.add_vision_block_count(1)
    writer.add_vision_head_count(_N_HEADS)
    writer.add_vision_attention_layernorm_eps(1e-5)
    writer.add_vision_image_mean([0.5] * 3)
    writer.add_vision_image_std([0.5] * 3)

    def add(name: str, *shape: int, has_bias: bool = True) -> None:
        matrix = (random.standard_normal(shape) * 0.2).astype(np.float32)
        writer.add_tensor(f"{name}.weight", matrix)
        if has_bias:
            writer.add_tensor(f"{name}.bias", np.zeros(shape[0], np.float32))

    add("v.patch_embd", _N_EMBD, 3, _PATCH_PIXELS, _PATCH_PIXELS, has_bias=False)
    add("v.position_embd", _N_PATCHES, _N_EMBD, has_bias=False)
    for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
        add(f"v.blk.0.{part}", _N_EMBD, _N_EMBD)
    add("v.blk.0.ln1", _N_EMBD)
    add("v.blk.0.ln2", _N_EMBD)
    add("v.blk.0.ffn_up", _N_FF, _N_EMBD)
    add("v.blk.0.ffn_down", _N_EMBD, _N_FF)
    add("mm.0", n_text, _N_EMBD)
    add("mm.2", n_text, n_text)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def image_part(seed: int) -> dict[str, object]:
    """Return a part of a message: a PNG of 28 x 28 pixels."""
    side = int(_N_PATCHES**0.5) * _PATCH_PIXELS
    rows = (bytes((seed * 37 + x * y) % 256 for x in range(3 * side)) for y in range(side))
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b""))
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    return {"type": "image_url", "image_url": {"url": url}}
