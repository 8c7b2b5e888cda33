"""What was found out about the llama-servers, their hosts and the directory; no opinion on it.

Owns: the nouns of an examination. None always means "could not be told" or "not looked at", never no.
"""

from dataclasses import dataclass
from typing import Any

from proxy.core.conditions import State
from proxy.core.model import Rule
from proxy.health import Degradation
from proxy.llama.hosts import HostedFlags
from proxy.servers.attach import ModelIdentity

USUAL_TOKENS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """llama-server as it describes itself; `n_ctx` is one slot's context in tokens.

    `name` is its model at a host, or its address among several; `host` is the kind of that host.
    """

    url: str
    name: str = ""
    host: str = ""
    build: str = ""
    model: str = ""
    n_slots: int = 0
    n_ctx: int = 0
    is_asleep: bool = False
    has_slot_save_path: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSaveFacts:
    """What became of the first save of an empty slot; `mode` and `owner_uid` are the file's.

    `problem` says why it is of no use; empty if the file is whole, and could be read and removed.
    """

    name: str = ""
    problem: str = ""
    mode: int = 0
    owner_uid: int | None = None


@dataclass(frozen=True, slots=True)
class SlotFacts:
    """How many slots there are of each kind; `n_held` are idle and hold tokens."""

    n_empty: int
    n_held: int
    n_busy: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFacts:
    """Whose states those of a llama-server are, and in which form; `canary` is what the model predicts."""

    identity: ModelIdentity
    layout: str
    canary: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFacts:
    """The checkpoints in the directory; *usable* are those of the model that runs now."""

    n_checkpoints: int = 0
    size_bytes: int = 0
    n_usable: int = 0
    usable_bytes: int = 0
    quarantined: str = ""
    """Which may have ended llama-server, in words."""
    knows_model_otherwise: bool = False
    """The same model is known with another cache layout or other adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """What a saved state is, and what it is good for once restored.

    `sections` are the kinds of the memory sections, "attention" or "recurrent"; empty if not understood.
    """

    file_version: int
    is_version_supported: bool
    sections: tuple[str, ...] = ()
    rule: Rule | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BehaviourFacts:
    """What llama-server was seen to do with idle slots and with requests that name no slot."""

    keeps_idle_slots: bool | None = None
    prefers_similar_slot: bool | None = None
    has_ram_cache: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CostFacts:
    """What a state of USUAL_TOKENS costs, by the saves and restores of the self-test.

    `state_bytes` are without context checkpoints, `largest_bytes` and the seconds with as many as there can
    be. `evaluate_seconds` is what it takes without the state.
    """

    state_bytes: int
    largest_bytes: int
    save_seconds: float
    restore_seconds: float
    evaluate_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaServerFacts:
    """All that was found out about one llama-server; what is None was not looked at.

    `degradations` are those of its attach, as they would stand in /health.
    """

    server: ServerFacts
    degradations: tuple[Degradation, ...] = ()
    slots: SlotFacts | None = None
    probe_save: ProbeSaveFacts | None = None
    states: StateFacts | None = None
    store: StoreFacts | None = None
    behaviour: BehaviourFacts | None = None
    memory: MemoryFacts | None = None
    cost: CostFacts | None = None
    failures: tuple[str, ...] = ()
    """Probes that did not come to their end, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryFacts:
    """The directory as the operating system shows it to this process."""

    path: str
    mode: int = 0
    is_private: bool = True
    """Whether its mode keeps it from everybody but its owner, or one group on purpose."""
    owner_uid: int = 0
    own_uid: int = 0
    problem: str = ""
    """Why this process cannot use it; empty if a file could be made, listed and removed."""
    index_problem: str = ""
    """Why the index in it cannot be read."""
    is_index_damaged: bool = False
    free_bytes: int | None = None
    budget_bytes: int = 0
    min_free_bytes: int = 0
    """What the proxy leaves free on the disk; without it nothing is saved."""
    used_bytes: int = 0
    """What checkpoints take already, of the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyFacts:
    """A proxy that uses the directory; `health` is its GET /health at `admin`, None if nobody answers."""

    admin: str
    lock: str
    health: dict[str, Any] | None = None

    @property
    def is_caching(self) -> bool:
        return self.health is not None and self.health["state"] != State.FORWARDING

    @property
    def rule(self) -> str:
        """The rule of its only llama-server, or that of each."""
        health = self.health or {}
        servers = sorted(health.get("llama_servers", {}).items())
        rules = (f"{name}: {each.get('rule', 'not attached')}" for name, each in servers)
        return health.get("rule") or ", ".join(rules) or "none yet, no model was loaded"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """A host of models: llama-server's router, or llama-swap; `n_at_most` may be loaded at once.

    `models` are all of them, by what the host says. `asked_for` is the one to be examined alone, `loaded`
    the one that was loaded for that, and `unloaded` are those that had to make room; `tells_of_loading` if
    clients that waited were told.
    """

    url: str
    kind: str
    tells_all_flags: bool = False
    n_at_most: int | None = None
    models: tuple[HostedFlags, ...] = ()
    asked_for: str = ""
    loaded: str = ""
    unloaded: tuple[str, ...] = ()
    tells_of_loading: bool | None = None
    problem: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind} at {self.url.partition('://')[2]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """All facts; a llama-server is one at an address of its own, or a loaded model of a host.

    `idle_save_seconds` is the proxy's setting, `asked_for` the model of --model.
    """

    directory: DirectoryFacts
    llama_servers: tuple[LlamaServerFacts, ...] = ()
    hosts: tuple[HostFacts, ...] = ()
    proxy: ProxyFacts | None = None
    idle_save_seconds: float = 0.0
    asked_for: str = ""

    @property
    def is_single(self) -> bool:
        """Whether there is one llama-server, at an address of its own."""
        return len(self.llama_servers) == 1 and not self.hosts
