"""What a model file's fingerprint sees, and what it leaves out."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from proxy.llama.files import SAMPLE_BYTES, fingerprint_model

N_ELEMENTS = 2 * SAMPLE_BYTES // 4


def write_model(path: Path, *, template: str = "{{ a }}", changed: int | None = None) -> Path:
    """Write a GGUF with two tensors; element *changed* of the second differs."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_chat_template(template)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "d"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5, 2.5])
    first = np.zeros((4, 8), dtype=np.float32)
    second = np.zeros(N_ELEMENTS, dtype=np.float32)
    if changed is not None:
        second[changed] = 1.0
    writer.add_tensor("first", first)
    writer.add_tensor("second", second)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model.gguf")


def test_fingerprint_of_the_same_model_elsewhere_is_the_same(model: Path, tmp_path: Path) -> None:
    fingerprint = fingerprint_model(model)
    assert fingerprint is not None and len(fingerprint) == 32
    assert fingerprint == fingerprint_model(write_model(tmp_path / "copy.gguf"))


def test_fingerprint_of_changed_weights_differs(model: Path, tmp_path: Path) -> None:
    changed = write_model(tmp_path / "changed.gguf", changed=5)
    assert fingerprint_model(changed) != fingerprint_model(model)


def test_fingerprint_samples_only_the_beginning_of_a_tensor(model: Path, tmp_path: Path) -> None:
    changed = write_model(tmp_path / "changed.gguf", changed=N_ELEMENTS - 1)
    assert fingerprint_model(changed) == fingerprint_model(model)


def test_fingerprint_after_another_chat_template_is_the_same(model: Path, tmp_path: Path) -> None:
    changed = write_model(tmp_path / "changed.gguf", template="{{ quite another one }}" * 9)
    assert fingerprint_model(changed) == fingerprint_model(model)


@pytest.mark.parametrize("content", [b"", b"GG", b"GGUF", b"ggml" + b"\0" * 99, b"GGUF\xff" * 9])
def test_fingerprint_of_what_is_no_gguf_is_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert fingerprint_model(path) is None


def test_fingerprint_of_a_missing_file_or_a_directory_is_none(tmp_path: Path) -> None:
    assert fingerprint_model(tmp_path / "gone.gguf") is None
    assert fingerprint_model(tmp_path) is None


def test_fingerprint_of_a_header_cut_anywhere_is_none(model: Path, tmp_path: Path) -> None:
    whole = model.read_bytes()
    n_header = whole.index(b"second") + 6
    path = tmp_path / "cut.gguf"
    for n_bytes in range(n_header):
        path.write_bytes(whole[:n_bytes])
        assert fingerprint_model(path) is None


@pytest.mark.parametrize("value", [0, 1, 255])
def test_fingerprint_of_a_damaged_header_raises_nothing(
    model: Path, tmp_path: Path, value: int
) -> None:
    whole = model.read_bytes()[: 64 << 10]
    path = tmp_path / "damaged.gguf"
    for index in range(whole.index(b"second") + 40):
        path.write_bytes(whole[:index] + bytes([value]) + whole[index + 1 :])
        fingerprint_model(path)


def test_fingerprint_with_an_alignment_of_zero_is_none(tmp_path: Path) -> None:
    name = b"general.alignment"
    field = struct.pack("<Q", len(name)) + name + struct.pack("<II", 4, 0)
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + field)
    assert fingerprint_model(path) is None


def test_fingerprint_of_a_split_model_covers_every_part(tmp_path: Path) -> None:
    first = write_model(tmp_path / "m-00001-of-00002.gguf")
    second = write_model(tmp_path / "m-00002-of-00002.gguf")
    whole = fingerprint_model(first)
    assert whole is not None and whole == fingerprint_model(second)
    write_model(second, changed=0)
    assert fingerprint_model(first) not in (whole, None)


def test_fingerprint_of_a_split_model_with_a_missing_part_is_none(tmp_path: Path) -> None:
    assert fingerprint_model(write_model(tmp_path / "m-00001-of-00002.gguf")) is None
