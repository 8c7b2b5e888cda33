"""What was found out about one llama-server and one directory; no opinion on it.

Owns: the nouns of an examination. None always means "could not be told" or "not looked at", never no.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from proxy.core.model import Rule
from proxy.core.slots import MAX_CONTEXT_CHECKPOINTS


class Contact(StrEnum):
    """How llama-server answered GET /props."""

    ANSWERS = "answers"
    UNREACHABLE = "unreachable"
    LOADING = "loading"
    KEY_MISSING = "key missing"
    KEY_WRONG = "key wrong"
    NOT_LLAMA_SERVER = "not a llama-server"
    NO_SLOTS = "no slots"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """llama-server as it describes itself; `n_ctx` is one slot's context in tokens.

    `name` is its model at a host, or its address among several; `host` is the kind of that host.
    """

    url: str
    contact: Contact
    name: str = ""
    host: str = ""
    detail: str = ""
    build: str = ""
    model: str = ""
    n_slots: int = 0
    n_ctx: int = 0
    is_asleep: bool = False
    is_restart_visible: bool = True
    has_slot_save_path: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryFacts:
    """The directory as the operating system shows it to this process."""

    path: str
    mode: int = 0
    owner_uid: int = 0
    own_uid: int = 0
    problem: str = ""
    """Why this process cannot use it; empty if a file could be made, listed, read and removed."""
    free_bytes: int | None = None
    budget_bytes: int = 0
    min_free_bytes: int = 0
    """What the proxy leaves free on the disk; without it nothing is saved."""
    used_bytes: int = 0
    """What checkpoints take already, of the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSaveFacts:
    """What became of a save of an empty slot.

    `refusal` is llama-server's, if it did not save; `mode` and `owner_uid` are the file's.
    """

    refusal: str = ""
    has_appeared: bool = False
    is_whole: bool = False
    problem: str = ""
    left_behind: str = ""
    """The file's name, if it could not be removed or lies nobody knows where."""
    mode: int = 0
    owner_uid: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFacts:
    """How many slots there are of each kind; `n_held` are idle and hold tokens."""

    n_empty: int
    n_held: int
    n_busy: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyFacts:
    """A proxy that uses the directory, by its admin listener's /health."""

    admin: str
    lock: str
    answers: bool = False
    is_caching: bool = False
    rule: str = ""
    reasons: tuple[str, ...] = ()
    written_last_day_bytes: int = 0
    max_write_bytes_per_day: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFacts:
    """Whose states those of a llama-server are, and in which form; what is the same fits another's.

    `numbers` are sizes of vocabulary and model. `model` says which file it is: its content if that could
    be read, else its path. `canary` is what it predicts.
    """

    model: str
    is_model_read: bool
    numbers: tuple[int, ...]
    adapters: tuple[tuple[int, str, float], ...] = ()
    layout: str = ""
    canary: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFacts:
    """The checkpoints in the directory; *usable* are those of the model that runs now."""

    problem: str = ""
    n_checkpoints: int = 0
    size_bytes: int = 0
    n_usable: int = 0
    usable_bytes: int = 0
    knows_model_otherwise: bool = False
    """The same model is known with another cache layout or other adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """What a saved state is, and what it is good for once restored."""

    file_version: int
    is_version_supported: bool
    sections: tuple[str, ...] = ()
    """Kinds of the memory sections, "attention" or "recurrent"; empty if not understood."""
    rule: Rule | None = None
    restores_beside: bool | None = None
    """Whether two slots that restore a state at once both continue from it."""
    remembered_rule: Rule | None = None
    """What a proxy begins with, without measuring: the index knows it of this model and build."""

    @property
    def may_have_sliding_window(self) -> bool:
        """Whether there are two attention caches, as sliding-window models have."""
        return self.sections.count("attention") >= 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BehaviourFacts:
    """What llama-server was seen to do with idle slots and with requests that name no slot."""

    keeps_idle_slots: bool | None = None
    prefers_similar_slot: bool | None = None
    has_ram_cache: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CostFacts:
    """Sizes and speeds of this model's states, from two saves and a restore."""

    fixed_bytes: int
    bytes_per_token: float
    context_checkpoint_bytes: int
    save_bytes_per_second: float
    restore_bytes_per_second: float
    evaluate_tokens_per_second: float

    def state_bytes(self, n_tokens: int) -> int:
        """Return the size of a state without its context checkpoints."""
        return self.fixed_bytes + round(self.bytes_per_token * n_tokens)

    def largest_state_bytes(self, n_tokens: int) -> int:
        """Return the size of a state with as many context checkpoints as there can be."""
        return self.state_bytes(n_tokens) + MAX_CONTEXT_CHECKPOINTS * self.context_checkpoint_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that was found out; what is None was not looked at."""

    server: ServerFacts
    directory: DirectoryFacts
    proxy: ProxyFacts | None = None
    slots: SlotFacts | None = None
    probe_save: ProbeSaveFacts | None = None
    states: StateFacts | None = None
    store: StoreFacts | None = None
    behaviour: BehaviourFacts = field(default_factory=BehaviourFacts)
    memory: MemoryFacts | None = None
    cost: CostFacts | None = None
    failures: tuple[str, ...] = ()
    """Probes that did not come to their end, and why."""
