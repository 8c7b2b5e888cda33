"""Writes small state files in the layout of docs/llama-server.md, section 7."""

import struct
from collections.abc import Iterable

MAGIC = 0x67677371
F16_ROW = (1, 8)
"""(ggml type, bytes per row) of the attention tensors written here."""
F32_ROW = (0, 16)


def words(tokens: Iterable[int], media: bytes = b"", n_media: int = 0) -> bytes:
    """Return the token list as llama-server writes it, media chunks included."""
    ids = [*tokens]
    return struct.pack(f"<3i{len(ids)}iI", -1, 1, len(ids), *ids, n_media) + media


def legacy_words(tokens: Iterable[int]) -> bytes:
    ids = [*tokens]
    return struct.pack(f"<{len(ids)}i", *ids)


def state_file(payload: bytes, *sections: bytes, version: int = 4, magic: int = MAGIC) -> bytes:
    return struct.pack("<III", magic, version, len(payload) // 4) + payload + b"".join(sections)


def attention(
    n_cells: int,
    *,
    first: int = 0,
    n_layers: int = 2,
    version: int = 4,
    is_v_transposed: bool = False,
    has_v: bool = True,
    is_mrope: bool = False,
    n_streams: int = 1,
) -> bytes:
    """Return an attention section whose cells lie in the last of its streams."""
    head = struct.pack("<I", n_streams) + struct.pack("<I", 0) * (n_streams - 1)
    cells = b"".join(_cell(first + i, is_mrope) for i in range(n_cells))
    kv = struct.pack("<II", is_v_transposed, n_layers)
    if version >= 4:
        kv += struct.pack("<II", 0, 0)
    row = struct.pack("<iQ", *F16_ROW) + b"\xab" * F16_ROW[1] * n_cells
    column = struct.pack("<iII", 1, 2, F16_ROW[1] // 2) + b"\xcd" * F16_ROW[1] * n_cells
    kv += row * n_layers
    if has_v:
        kv += (column if is_v_transposed else row) * n_layers
    return head + struct.pack("<I", n_cells) + (cells + kv if n_cells else b"")


def _cell(position: int, is_mrope: bool) -> bytes:
    extra = struct.pack("<iii", position, position, 7) if is_mrope else b""
    return struct.pack("<iI", position, 1) + extra + struct.pack("<i", 0)


def recurrent(last_position: int, *, n_layers: int = 4, n_with_state: int = 3) -> bytes:
    """Return a recurrent section: one cell, whatever the number of tokens."""
    row = struct.pack("<iQ", *F32_ROW) + b"\xef" * F32_ROW[1]
    head = struct.pack("<I", 1) + struct.pack("<iI", last_position, 0)
    return head + struct.pack("<II", 0, n_layers) + row * 2 * n_with_state


def context_checkpoints(*entries: tuple[int, int, int], version: int = 1) -> bytes:
    """Return the appendix with one context checkpoint per (n_tokens, pos_min, pos_max)."""
    blob = struct.pack("<Q", 5) + b"\x11" * 5
    body = b"".join(struct.pack("<qii", *entry) + blob * 3 for entry in entries)
    return b"SCKP" + struct.pack("<II", version, len(entries)) + body


def draft_state() -> bytes:
    blob = struct.pack("<Q", 9) + b"\x22" * 9
    return b"SDFT" + struct.pack("<I", 1) + blob * 2
