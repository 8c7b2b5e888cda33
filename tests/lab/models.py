"""Builds the lab models: GGUF files with random weights that a real llama-server can serve.

python -m tests.lab.models DEST [--kind KIND ...] [--size SIZE ...]
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import gguf

from tests.lab import architectures
from tests.lab.layers import Shape
from tests.lab.server import DEFAULT_MODEL_FOLDER
from tests.lab.vocabulary import END_OF_TEXT, END_OF_TURN, PRE_TOKENIZER_NAME, train_vocabulary
from tests.lab.weights import TensorWriter

TEMPLATE_FOLDER = Path(__file__).with_name("templates")


@dataclass(frozen=True)
class Kind:
    """One architecture and the chat template that its files carry."""

    architecture: str
    write: architectures.WriteArchitecture
    template: str = "plain"
    # Gemma multiplies its embeddings by the square root of their length.
    scales_embedding: bool = False


KINDS = {
    "full": Kind("llama", architectures.write_full),
    "swa": Kind("gemma3", architectures.write_swa, scales_embedding=True),
    "recurrent": Kind("mamba2", architectures.write_recurrent),
    "hybrid": Kind("qwen35", architectures.write_hybrid, template="thinking"),
    "hybrid_mtp": Kind("qwen35", architectures.write_hybrid_mtp, template="thinking"),
    "sparse": Kind("glm-dsa", architectures.write_sparse),
    "sparse_window": Kind("dots3note", architectures.write_sparse_window),
    "compressed": Kind("deepseek4", architectures.write_compressed),
    "hybrid_no_mrope": Kind("granitehybrid", architectures.write_hybrid_no_mrope),
}

_OF_FOUR_LAYERS = ("sparse_window", "compressed")
"""With two layers, the proxy cannot read the first one's states, and llama-server ends with the second."""

MEMORIES = ("full", "swa", "recurrent", "hybrid")
"""One kind for each way in which a model remembers what it has read."""

SIZES = {
    # For tests, whose time is mostly llama-server's: it evaluates twice as many tokens a second.
    "least": Shape(
        n_layers=2, n_embd=64, n_ff=128, n_heads=2, n_kv_heads=2, head_size=16, state_size=32
    ),
    "tiny": Shape(
        n_layers=4, n_embd=64, n_ff=128, n_heads=2, n_kv_heads=1, head_size=32, state_size=32
    ),
    "small": Shape(
        n_layers=8, n_embd=512, n_ff=1024, n_heads=8, n_kv_heads=2, head_size=64, state_size=64
    ),
    # 256 KB of keys and values for each token: 4,000 tokens are a state of 1 GB, but 38 MB of weights.
    "large": Shape(
        n_layers=64, n_embd=64, n_ff=128, n_heads=8, n_kv_heads=8, head_size=128, state_size=32
    ),
    # Six of the hybrid's layers keep 8 states of 512 x 512 floats: 50 MB for each sequence and for each
    # of its context checkpoints, as with a model of some 30 billion weights, but 19 MB of weights.
    "heavy": Shape(
        n_layers=8, n_embd=64, n_ff=128, n_heads=8, n_kv_heads=1, head_size=32, state_size=512
    ),
    # What Qwen3.5 4B has of weights (7.7 GB here), of keys and values (32 KiB for each token) and of
    # recurrent state (50 MB for each sequence and each of its context checkpoints).
    "4b": Shape(
        n_layers=32, n_embd=2560, n_ff=9216, n_heads=32, n_kv_heads=8, head_size=128, state_size=128
    ),
    # What Qwen3.5 27B has in Q8_0: 28 GB of weights, 64 KiB for each token, 151 MB of recurrent state.
    "27b": Shape(
        n_layers=64,
        n_embd=5120,
        n_ff=17408,
        n_heads=48,
        n_kv_heads=8,
        head_size=128,
        state_size=128,
        is_quantized=True,
    ),
}


def model_path(kind: str, size: str, folder: Path) -> Path:
    """Return where `build_model` puts a model."""
    return folder / f"{kind}-{size}.gguf"


def least_model(kind: str) -> Path:
    """Return the model of a kind that most tests serve."""
    size = "tiny" if kind in _OF_FOUR_LAYERS else "least"
    return model_path(kind, size, DEFAULT_MODEL_FOLDER)


def build_model(kind: str, size: str, dest: Path) -> Path:
    """Write one model into the folder `dest`, unless it is there already, and return its path."""
    path = model_path(kind, size, dest)
    if not path.exists():
        dest.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        _write_model(unfinished, kind, size)
        unfinished.replace(path)
    return path


def _write_model(path: Path, kind_name: str, size: str) -> None:
    kind, shape = KINDS[kind_name], SIZES[size]
    writer = gguf.GGUFWriter(path, kind.architecture)
    writer.add_name(f"lab-{kind_name}-{size}")
    file_types = gguf.LlamaFileType
    writer.add_file_type(file_types.MOSTLY_Q8_0 if shape.is_quantized else file_types.MOSTLY_F16)
    writer.add_chat_template((TEMPLATE_FOLDER / f"{kind.template}.jinja").read_text())
    _write_vocabulary(writer)
    tensors = TensorWriter(writer, is_quantized=shape.is_quantized)
    _write_token_matrices(tensors, kind, shape)
    kind.write(writer, tensors, shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_vocabulary(writer: gguf.GGUFWriter) -> None:
    vocabulary = train_vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER_NAME)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.token_types())
    writer.add_token_merges(vocabulary.merges)
    writer.add_bos_token_id(vocabulary.tokens.index(END_OF_TEXT))
    writer.add_eos_token_id(vocabulary.tokens.index(END_OF_TURN))
    writer.add_pad_token_id(vocabulary.tokens.index(END_OF_TEXT))
    writer.add_add_bos_token(False)


def _write_token_matrices(tensors: TensorWriter, kind: Kind, shape: Shape) -> None:
    vocabulary = train_vocabulary()
    factor = shape.n_embd**-0.5 if kind.scales_embedding else 1.0
    tensors.embedding("token_embd.weight", vocabulary, shape.n_embd, factor)
    tensors.constant("output_norm.weight", shape.n_embd)
    tensors.output("output.weight", vocabulary, shape.n_embd)


def main() -> None:
    """Build the models that the command line names; all kinds in size tiny by default."""
    parser = argparse.ArgumentParser(description="Build random GGUF models for the tests.")
    parser.add_argument("dest", type=Path, metavar="DEST")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["tiny"])
    arguments = parser.parse_args()
    for size in arguments.size:
        for kind in arguments.kind:
            print(build_model(kind, size, arguments.dest))


if __name__ == "__main__":
    main()
