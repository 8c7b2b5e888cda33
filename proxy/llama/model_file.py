"""A fingerprint of a model file: its tensors' names, shapes and first bytes.

The metadata is left out on purpose: another chat template in the file changes no state. What the
sample does not see (a merged adapter in the middle of a tensor, a rope flag) the log-probability
canary does.
"""

import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import xxhash

GGUF_MAGIC = b"GGUF"
SAMPLE_BYTES = 64 << 10
MAX_NAME_BYTES = 64 << 10
_STRING, _ARRAY = 8, 9
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_SPLIT_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def fingerprint_model(path: Path) -> str | None:
    """Return a hex digest over all parts of the model at *path*, or None if it is not readable GGUF."""
    digest = xxhash.xxh3_128()
    try:
        for part in _parts(path):
            with part.open("rb") as file:
                for sample in _samples(file):
                    digest.update(sample)
    except (OSError, ValueError, KeyError, ArithmeticError, struct.error):
        return None
    return digest.hexdigest()


def _parts(path: Path) -> list[Path]:
    match = _SPLIT_NAME.search(path.name)
    if not match:
        return [path]
    stem, n_parts = path.name[: match.start()], int(match.group(2))
    return [path.with_name(f"{stem}-{i:05}-of-{n_parts:05}.gguf") for i in range(1, n_parts + 1)]


def _samples(file: BinaryIO) -> Iterator[bytes]:
    """Yield the tensor directory, then the first bytes of each tensor."""
    if file.read(4) != GGUF_MAGIC:
        raise ValueError("not a GGUF file")
    _, n_tensors, n_fields = struct.unpack("<IQQ", file.read(20))
    alignment = 32
    for _ in range(n_fields):
        name = _read_string(file)
        value = _read_value(file, _read_u32(file))
        if name == b"general.alignment" and isinstance(value, bytes):
            alignment = int.from_bytes(value, "little")
    directory_start = file.tell()
    offsets = [_read_tensor_offset(file) for _ in range(n_tensors)]
    directory_end = file.tell()
    file.seek(directory_start)
    yield file.read(directory_end - directory_start)
    data_start = -(-directory_end // alignment) * alignment
    ends = [*sorted(offsets)[1:], os.fstat(file.fileno()).st_size - data_start]
    for offset, end in zip(sorted(offsets), ends, strict=True):
        file.seek(data_start + offset)
        yield file.read(min(SAMPLE_BYTES, end - offset))


def _read_u32(file: BinaryIO) -> int:
    return int(struct.unpack("<I", file.read(4))[0])


def _read_u64(file: BinaryIO) -> int:
    return int(struct.unpack("<Q", file.read(8))[0])


def _read_string(file: BinaryIO) -> bytes:
    n_bytes = _read_u64(file)
    if n_bytes > MAX_NAME_BYTES:
        raise ValueError("not a name")
    return file.read(n_bytes)


def _read_value(file: BinaryIO, value_type: int) -> bytes | None:
    """Read a metadata value; only scalars are returned, the rest is skipped."""
    if value_type == _STRING:
        file.seek(_read_u64(file), os.SEEK_CUR)
        return None
    if value_type != _ARRAY:
        return file.read(_SCALAR_BYTES[value_type])
    element_type, n_elements = _read_u32(file), _read_u64(file)
    if element_type in _SCALAR_BYTES:
        file.seek(_SCALAR_BYTES[element_type] * n_elements, os.SEEK_CUR)
    else:
        for _ in range(n_elements):
            _read_value(file, element_type)
    return None


def _read_tensor_offset(file: BinaryIO) -> int:
    _read_string(file)
    n_dimensions = _read_u32(file)
    file.seek(8 * n_dimensions + 4, os.SEEK_CUR)
    return _read_u64(file)
