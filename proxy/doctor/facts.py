"""What doctor found out about the llama-servers, their hosts and the directory; no opinion on it.

Owns: the nouns of an examination, which fills them in as it goes. None always means "could not be told" or
"not looked at", never no.
"""

from dataclasses import dataclass, field
from typing import Any

from proxy.core.conditions import State
from proxy.core.model import Rule, is_same_canary
from proxy.health import Degradation
from proxy.llama.state_file import Section
from proxy.settings import Settings
from proxy.store.known_models import Owner

USUAL_TOKENS = 10_000
Layout = tuple[int, tuple[Section, ...] | None]
"""Slot file version and memory sections of a state file; None if these are not understood."""


def is_same_model(one: Owner, other: Owner | None) -> bool:
    """Return whether the states of two owners are of the same model, whichever store has them."""
    return (
        other is not None
        and one.static == other.static
        and is_same_canary(one.known.canary, other.known.canary)
    )


@dataclass(slots=True, kw_only=True)
class LlamaServerFacts:
    """One llama-server, as it describes itself and as its attach and the probes found it.

    `name` is its model at a host, or its address among several; `host` is the kind of that host.
    `n_ctx` is one slot's context in tokens. `probe_name` is the first file that it was told to save, and
    `probe_mode` and `probe_owner_uid` tell how it saves files. `layout` and `owner` say in which form its
    states are, and whose. `state_bytes` is what a state of USUAL_TOKENS takes at most, 0 if that was not
    measured; the seconds are what its save, its restore, and the evaluation of its tokens take. `usable`
    checkpoints of the directory are of the model that runs now.
    """

    url: str
    name: str = ""
    host: str = ""
    build: str = ""
    model: str = ""
    n_slots: int = 0
    n_ctx: int = 0
    is_asleep: bool = False
    degradations: tuple[Degradation, ...] = ()
    """Those of its attach, as they would stand in /health."""
    failures: list[str] = field(default_factory=list)
    """Probes that did not come to their end, and why."""
    n_empty: int | None = None
    n_held: int = 0
    n_busy: int = 0
    probe_name: str = ""
    probe_mode: int = 0
    probe_owner_uid: int | None = None
    layout: Layout | None = None
    owner: Owner | None = None
    rule: Rule | None = None
    state_bytes: int = 0
    save_seconds: float = 0.0
    restore_seconds: float = 0.0
    evaluate_seconds: float = 0.0
    n_usable: int = 0
    usable_bytes: int = 0
    has_ram_cache: bool | None = None

    @property
    def section_kinds(self) -> list[str]:
        """The kinds of the memory sections, "attention" or "recurrent"; empty if not understood."""
        return [section.kind for section in (self.layout[1] if self.layout else None) or ()]


@dataclass(slots=True, kw_only=True)
class HostFacts:
    """A host of models: llama-server's router, or llama-swap; `n_at_most` may be loaded at once.

    `models` are the names of all. `asked_for` is the one to be examined alone, and `loaded` the same if it
    was loaded for that.
    """

    url: str
    kind: str
    n_at_most: int | None = None
    models: tuple[str, ...] = ()
    asked_for: str = ""
    loaded: str = ""
    problem: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind} at {self.url.partition('://')[2]}"


@dataclass(slots=True, kw_only=True)
class Setup:
    """All facts: the directory, who else uses it, and all that `upstream` names.

    A llama-server is one at an address of its own, or a loaded model of a host. `problem` says why this
    process cannot use the directory, `index_problem` why the index in it cannot be read. `lock` is not
    empty if a proxy uses the directory; `health` is what that proxy answers at `settings.admin`, None if
    nobody does. `asked_for` is the model of --model. The settings are without the API key.
    """

    settings: Settings
    own_uid: int
    asked_for: str = ""
    mode: int = 0
    owner_uid: int = 0
    free_bytes: int | None = None
    problem: str = ""
    index_problem: str = ""
    is_index_damaged: bool = False
    n_checkpoints: int = 0
    used_bytes: int = 0
    quarantined: str = ""
    """The checkpoints that may have ended llama-server, in words."""
    lock: str = ""
    health: dict[str, Any] | None = None
    hosts: list[HostFacts] = field(default_factory=list)
    llama_servers: list[LlamaServerFacts] = field(default_factory=list)

    @property
    def is_proxy_caching(self) -> bool:
        return self.health is not None and self.health["state"] != State.FORWARDING
