"""How large a state is, for models that people run: the table of docs/disk.md. Pure arithmetic.

The values are those of the models' public configurations (config.json): `num_hidden_layers`,
`num_key_value_heads`, `head_dim`, `sliding_window`, and for gated delta nets `linear_num_key_heads`,
`linear_num_value_heads`, `linear_value_head_dim`.
"""

from dataclasses import dataclass

N_TOKENS = 30_000
N_CONTEXT_CHECKPOINTS = 3
F16_BYTES, F32_BYTES = 2, 4
TOKEN_BYTES = 4
CELL_BYTES = 12
"""Position, number of sequences and sequence of a token in a cache; M-RoPE adds as much again."""
CONVOLUTION_STEPS = 3


@dataclass(frozen=True, slots=True)
class Configuration:
    """What decides the size of a state; layers that are not there are 0."""

    name: str
    kv_heads: int
    head_size: int
    full_layers: int
    window_layers: int = 0
    window: int = 0
    recurrent_layers: int = 0
    value_heads: int = 0
    key_heads: int = 0
    recurrent_head_size: int = 0
    has_mrope: bool = False

    @property
    def row_bytes(self) -> int:
        """Return K and V of one token in one attention layer."""
        return 2 * self.kv_heads * self.head_size * F16_BYTES

    @property
    def token_bytes(self) -> int:
        """Return what each token adds."""
        if not self.full_layers:
            return TOKEN_BYTES
        cell = CELL_BYTES * (2 if self.has_mrope else 1)
        return TOKEN_BYTES + cell + self.full_layers * self.row_bytes

    @property
    def fixed_bytes(self) -> int:
        """Return what does not grow: the attention window, or the recurrent state."""
        window = self.window * (self.window_layers * self.row_bytes + CELL_BYTES)
        size = self.recurrent_head_size
        state = self.value_heads * size * size
        convolution = CONVOLUTION_STEPS * (2 * self.key_heads + self.value_heads) * size
        return window + self.recurrent_layers * (state + convolution) * F32_BYTES

    def state_bytes(self, n_tokens: int, n_context_checkpoints: int) -> int:
        """Return the size of a state file."""
        n_copies = 1 + n_context_checkpoints
        return n_tokens * self.token_bytes + n_copies * self.fixed_bytes


CONFIGURATIONS = (
    Configuration("Llama 3.1 8B", kv_heads=8, head_size=128, full_layers=32),
    Configuration("Llama 3.3 70B", kv_heads=8, head_size=128, full_layers=80),
    Configuration("Qwen3 8B", kv_heads=8, head_size=128, full_layers=36),
    Configuration("Qwen3 30B-A3B, Qwen3-Coder 30B-A3B", kv_heads=4, head_size=128, full_layers=48),
    Configuration("Gemma 3 27B", 16, 128, 10, window_layers=52, window=1024),
    Configuration("gpt-oss 20B", 8, 64, 12, window_layers=12, window=128),
    Configuration("gpt-oss 120B", 8, 64, 18, window_layers=18, window=128),
    Configuration(
        *("Qwen3-Next 80B-A3B", 2, 256, 12),
        recurrent_layers=36,
        value_heads=32,
        key_heads=16,
        recurrent_head_size=128,
    ),
)


def sizes_table() -> str:
    """Return what states of each model take, and the values that this follows from, as a Markdown table."""
    rows = [
        "| model | KV heads x size | layers | 1,000 tokens | does not grow | 30,000 tokens | in 20 GiB |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for each in CONFIGURATIONS:
        n_copies = N_CONTEXT_CHECKPOINTS if each.fixed_bytes else 0
        state = each.state_bytes(N_TOKENS, n_copies)
        fixed = _megabytes(each.fixed_bytes) if each.fixed_bytes else "-"
        rows.append(
            f"| {each.name} | {each.kv_heads} x {each.head_size} | {_layers(each)} "
            f"| {_megabytes(1000 * each.token_bytes)} | {fixed} "
            f"| {state / 1e9:.2f} GB | {(20 << 30) // state} |"
        )
    return "\n".join(rows) + "\n"


def _layers(each: Configuration) -> str:
    layers = [f"{each.full_layers} full"]
    if each.window_layers:
        layers.append(f"{each.window_layers} with a window of {each.window:,}")
    if each.recurrent_layers:
        layers.append(
            f"{each.recurrent_layers} recurrent, {each.value_heads} value and {each.key_heads} key "
            f"heads of {each.recurrent_head_size}"
        )
    return "; ".join(layers)


def _megabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.0f} MB"
