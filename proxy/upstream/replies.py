"""llama-server's JSON replies, as far as the proxy reads them; unknown fields are ignored."""

from typing import Any

import msgspec


class GenerationDefaults(msgspec.Struct):
    n_ctx: int = 0


class Props(msgspec.Struct):
    """GET /props. `media_marker` is new in every process, so it names the process."""

    total_slots: int = 0
    media_marker: str = ""
    model_path: str = ""
    build_info: str = ""
    is_sleeping: bool = False
    default_generation_settings: GenerationDefaults = msgspec.field(
        default_factory=GenerationDefaults
    )
    modalities: dict[str, Any] = {}


class SlotStatus(msgspec.Struct):
    """One entry of GET /slots; `id_task` and `n_prompt_tokens` are absent until the slot has run a task.

    `n_prompt_tokens` is how many tokens the slot holds; a restore alone does not set it.
    """

    id: int
    is_processing: bool = False
    id_task: int = -1
    n_prompt_tokens: int = 0


class Timings(msgspec.Struct, frozen=True):
    """What a generation reused and evaluated; cache_n + prompt_n is the prompt's length."""

    cache_n: int
    prompt_n: int
    prompt_ms: float = 0.0
    predicted_n: int = 0


class Saved(msgspec.Struct):
    n_saved: int
    n_written: int


class Restored(msgspec.Struct):
    n_restored: int


class Evaluated(msgspec.Struct):
    """A /completion reply of which only the accounting and the slot matter."""

    timings: Timings
    id_slot: int = -1


class Probability(msgspec.Struct):
    id: int
    logprob: float


class TokenProbabilities(msgspec.Struct):
    top_logprobs: list[Probability]


class Canary(msgspec.Struct):
    """A /completion reply with n_probs."""

    completion_probabilities: list[TokenProbabilities]


class AppliedTemplate(msgspec.Struct):
    prompt: str


class Tokenized(msgspec.Struct):
    tokens: list[int]


class Piece(msgspec.Struct):
    id: int
    piece: str | list[int]


class TokenizedPieces(msgspec.Struct):
    tokens: list[Piece]


class ModelMeta(msgspec.Struct):
    n_vocab: int = 0
    n_params: int = 0
    size: int = 0


class ModelEntry(msgspec.Struct):
    id: str = ""
    meta: ModelMeta | None = None


class Models(msgspec.Struct):
    data: list[ModelEntry] = []


class LoraAdapter(msgspec.Struct):
    id: int
    path: str = ""
    scale: float = 0.0


class ErrorDetail(msgspec.Struct):
    message: str = ""


class ErrorReply(msgspec.Struct):
    error: ErrorDetail
