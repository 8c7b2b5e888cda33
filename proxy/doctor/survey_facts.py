"""What was found out about all that `upstream` names; no opinion on it.

Owns: the nouns around the facts of one llama-server: its host, and the others beside it.
"""

from dataclasses import dataclass

from proxy.doctor.facts import DirectoryFacts, Facts, ProxyFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedFacts:
    """One model of a host, by what the host says; its flags are None or 0 where they are not told."""

    name: str
    is_loaded: bool = False
    slot_save_path: str | None = None
    unload_seconds: float = 0.0
    sleep_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """A host of models: llama-server's router, or llama-swap; `n_at_most` may be loaded at once.

    `asked_for` is the model that was to be examined alone. `loaded` is the one that was loaded for that,
    and `unloaded` are those that had to make room; `tells_of_loading` if clients that waited were told.
    """

    url: str
    kind: str
    tells_all_flags: bool = False
    n_at_most: int | None = None
    models: tuple[HostedFacts, ...] = ()
    asked_for: str = ""
    loaded: str = ""
    unloaded: tuple[str, ...] = ()
    tells_of_loading: bool | None = None
    problem: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind} at {self.url.partition('://')[2]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsFacts:
    """The settings of the proxy that what is found is held against."""

    idle_save_seconds: float = 0.0
    asked_for: str = ""
    """The model of --model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """All facts; a llama-server is one at an address of its own, or a loaded model of a host."""

    directory: DirectoryFacts
    llama_servers: tuple[Facts, ...]
    hosts: tuple[HostFacts, ...] = ()
    proxy: ProxyFacts | None = None
    settings: SettingsFacts = SettingsFacts()

    @property
    def is_single(self) -> bool:
        """Whether there is one llama-server, at an address of its own."""
        return len(self.llama_servers) == 1 and not self.hosts
