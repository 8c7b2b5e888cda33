"""A fingerprint of a model file: its tensors' names, shapes and first bytes.

The metadata is left out on purpose: another chat template in the file changes no state. The log-probability
canary detects differences outside the sample (a merged adapter in the middle of a tensor, a rope flag).
"""

import os
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import xxhash

from proxy.errors import StateFileMalformed
from proxy.llama.state_file import Reader, require

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
                for sample in _samples(Reader(file, os.fstat(file.fileno()).st_size)):
                    digest.update(sample)
    except (OSError, KeyError, ArithmeticError, StateFileMalformed):
        return None
    return digest.hexdigest()


def _parts(path: Path) -> list[Path]:
    match = _SPLIT_NAME.search(path.name)
    if not match:
        return [path]
    stem, n_parts = path.name[: match.start()], int(match.group(2))
    return [path.with_name(f"{stem}-{i:05}-of-{n_parts:05}.gguf") for i in range(1, n_parts + 1)]


def _samples(reader: Reader) -> Iterator[bytes]:
    """Yield the tensor directory, then the first bytes of each tensor."""
    require(reader.bytes(4) == b"GGUF", "is not a GGUF file")
    _, n_tensors, n_fields = reader.numbers("IQQ")
    alignment = 32
    for _ in range(n_fields):
        name = _read_name(reader)
        value = _read_value(reader, reader.number())
        if name == b"general.alignment" and isinstance(value, bytes):
            alignment = int.from_bytes(value, "little")
    directory = reader.position
    offsets = sorted(_read_tensor_offset(reader) for _ in range(n_tensors))
    data = -(-reader.position // alignment) * alignment
    n_bytes, reader.position = reader.position - directory, directory
    yield reader.bytes(n_bytes)
    for offset, end in pairwise([*offsets, reader.size_bytes - data]):
        reader.position = data + offset
        yield reader.bytes(min(SAMPLE_BYTES, end - offset))


def _read_name(reader: Reader) -> bytes:
    n_bytes = reader.number("Q")
    require(n_bytes <= MAX_NAME_BYTES, "has no name where one should be")
    return reader.bytes(n_bytes)


def _read_value(reader: Reader, value_type: int) -> bytes | None:
    """Read a metadata value; only scalars are returned, the rest is skipped."""
    if value_type == _STRING:
        reader.skip(reader.number("Q"))
    elif value_type != _ARRAY:
        return reader.bytes(_SCALAR_BYTES[value_type])
    else:
        element_type, n_elements = reader.numbers("IQ")
        if element_type in _SCALAR_BYTES:
            reader.skip(_SCALAR_BYTES[element_type] * n_elements)
        else:
            for _ in range(n_elements):
                _read_value(reader, element_type)
    return None


def _read_tensor_offset(reader: Reader) -> int:
    _read_name(reader)
    reader.skip(8 * reader.number() + 4)
    return reader.number("Q")
