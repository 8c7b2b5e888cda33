"""llama-swap's configuration, as far as it is understood here; anything else is refused."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

DEFAULT_CONCURRENCY_LIMIT = 10
# What a browser loads with a page must not start a model.
_STATIC_FILES = r"\.(css|gif|ico|jpeg|jpg|js|json|png|svg|txt)$"
_ENVIRONMENT = re.compile(r"\$\{env\.(\w+)\}")


class Filters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What becomes of bodies that name a model; not of what is sent to /upstream."""

    strip_params: str = ""
    set_params: dict[str, Any] = {}
    set_params_by_id: dict[str, dict[str, Any]] = msgspec.field(
        default_factory=dict, name="setParamsByID"
    )

    def applied(self, fields: dict[str, Any], requested: str) -> dict[str, Any]:
        """Return a body with these filters applied, as requested by one of its model's names."""
        stripped = {name.strip() for name in self.strip_params.split(",")} - {"model"}
        kept = {name: value for name, value in fields.items() if name not in stripped}
        return {**kept, **self.set_params, **self.set_params_by_id.get(requested, {})}


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
    filters: Filters = Filters()


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
    def aliases(self) -> set[str]:
        return {*self.settings.aliases, *self.settings.filters.set_params_by_id}

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
        return next((m for m in self.models.values() if name in m.aliases), None)


def read_config(path: Path) -> Config:
    text = _ENVIRONMENT.sub(lambda found: os.environ[found[1]], path.read_text())
    file = msgspec.yaml.decode(text, type=_File)
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
