"""llama-swap's configuration, as far as it is understood here; anything else is refused."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import msgspec

DEFAULT_GROUP = "(default)"
DEFAULT_CONCURRENCY_LIMIT = 10
# What a browser loads with a page must not start a model.
_STATIC_FILES = r"\.(css|gif|ico|jpeg|jpg|js|json|png|svg|txt)$"


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """One entry of `models`."""

    cmd: str
    proxy: str = "http://localhost:${PORT}"
    aliases: tuple[str, ...] = ()
    check_endpoint: str = "/health"
    ttl: int = 0
    unload_timeout: int = 0
    use_model_name: str = ""
    concurrency_limit: int = 0
    unlisted: bool = False
    name: str = ""
    description: str = ""


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Members swap with each other, an exclusive group with all others but persistent ones."""

    members: tuple[str, ...] = ()
    swap: bool = True
    exclusive: bool = True
    persistent: bool = False


class _Upstream(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    ignore_paths: tuple[str, ...] = (_STATIC_FILES,)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    models: dict[str, ModelSettings]
    groups: dict[str, Group] = {}
    start_port: int = 5800
    health_check_timeout: int = 120
    unload_timeout: int = 10
    include_aliases_in_list: bool = False
    send_loading_state: bool = False
    api_keys: tuple[str, ...] = ()
    upstream: _Upstream = _Upstream()


@dataclass(frozen=True, slots=True)
class Model:
    """One model, its command and address complete."""

    id: str
    settings: ModelSettings
    group: Group
    command: str
    proxy: str
    unload_seconds: int

    @property
    def words(self) -> list[str]:
        return shlex.split(self.command, comments=True)

    @property
    def concurrency_limit(self) -> int:
        return self.settings.concurrency_limit or DEFAULT_CONCURRENCY_LIMIT


@dataclass(frozen=True, slots=True)
class Config:
    """What llama-swap was told."""

    models: dict[str, Model]
    start_seconds: int
    lists_aliases: bool
    sends_loading_state: bool
    api_keys: tuple[str, ...]
    ignore_paths: tuple[str, ...]

    def find(self, name: str) -> Model | None:
        """Return the model with that id or alias."""
        if name in self.models:
            return self.models[name]
        return next((m for m in self.models.values() if name in m.settings.aliases), None)


def read_config(path: Path) -> Config:
    file = msgspec.yaml.decode(path.read_bytes(), type=_File)
    models: dict[str, Model] = {}
    for offset, (model_id, settings) in enumerate(sorted(file.models.items())):
        macros = {"${PORT}": str(file.start_port + offset), "${MODEL_ID}": model_id}
        models[model_id] = Model(
            model_id,
            settings,
            _group_of(model_id, file.groups),
            _filled_in(settings.cmd, macros),
            _filled_in(settings.proxy, macros),
            settings.unload_timeout or file.unload_timeout,
        )
    return Config(
        models,
        file.health_check_timeout,
        file.include_aliases_in_list,
        file.send_loading_state,
        file.api_keys,
        file.upstream.ignore_paths,
    )


def _group_of(model_id: str, groups: dict[str, Group]) -> Group:
    return next((g for g in groups.values() if model_id in g.members), _THE_OTHERS)


# All models that no group names are in one.
_THE_OTHERS = Group()


def _filled_in(text: str, macros: dict[str, str]) -> str:
    for macro, value in macros.items():
        text = text.replace(macro, value)
    return text
