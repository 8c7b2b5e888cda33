"""The table of settings and the example of a settings file, from the schema."""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from proxy.settings import ENVIRONMENT_PREFIX, UNITS, Settings, is_size

WIDTH = 104
BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}

EXAMPLE_HEAD = """\
# llama-prefix-cache: every setting with its default.
# Use it with `llama-prefix-cache serve --config FILE`. Flags (--max-store-bytes) beat the environment
# (LLAMA_PREFIX_CACHE_MAX_STORE_BYTES), which beats this file. An unknown name is refused at start.
# Written by `make docs` from proxy/settings.py.
"""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as it is documented; `metas` are all that its type was annotated with."""

    name: str
    type: Any
    default: Any
    metas: tuple[Meta, ...]

    @property
    def words(self) -> str:
        """Return the description and whatever more there is to say."""
        description = next((m.description for m in self.metas if m.description), "")
        more = [m.extra["more"] for m in self.metas if m.extra and "more" in m.extra]
        return " ".join([description, *more])

    @property
    def example(self) -> Any:
        """Return the default, or an example where there is none."""
        if self.default is not msgspec.NODEFAULT:
            return self.default
        return next(example for m in self.metas if m.examples for example in m.examples)

    def written(self, value: Any) -> str:
        """Return a value as people write it in YAML."""
        if value is None:
            return "null"
        if value == "":
            return '""'
        if isinstance(value, bool):
            return str(value).lower()
        if is_size(self.name) and value:
            unit = next((u for u, n_bytes in reversed(UNITS.items()) if value % n_bytes == 0), "")
            return f"{value // UNITS.get(unit, 1)}{unit}"
        return f"{value:g}" if isinstance(value, float) else str(value)

    @property
    def allowed(self) -> str:
        """Return what the setting may be, in words."""
        bounds = [
            f"{words} {self.written(limit)}"
            for meta in self.metas
            for key, words in BOUNDS.items()
            if (limit := getattr(meta, key)) is not None
        ]
        title = next((m.title for m in self.metas if m.title), None)
        return ", ".join([title or _kind(self.name, self.type), *bounds])


def _kind(name: str, type_: Any) -> str:
    if get_origin(type_) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(type_))
    if isinstance(type_, UnionType):
        kinds = [_kind(name, part) for part in get_args(type_) if part is not type(None)]
        return " or ".join([*kinds, "nothing"])
    if is_size(name):
        return "bytes or a size such as 5GiB"
    words = {bool: "true or false", int: "whole number", float: "number", str: "text"}
    return words.get(type_, str(type_))


def all_settings() -> Iterator[Setting]:
    """Yield every setting, in the order of the schema."""
    for field in msgspec.structs.fields(Settings):
        type_, metas = field.type, list[Meta]()
        while hasattr(type_, "__metadata__"):
            metas += [m for m in type_.__metadata__ if isinstance(m, Meta)]
            type_ = get_args(type_)[0]
        yield Setting(field.name, type_, field.default, tuple(metas))


def settings_table() -> str:
    """Return the settings as a Markdown table."""
    rows = ["| setting | allowed | default | what it does |", "|---|---|---|---|"]
    for setting in all_settings():
        is_needed = setting.default is msgspec.NODEFAULT
        default = "none: must be given" if is_needed else f"`{setting.written(setting.default)}`"
        flag, variable = _flag(setting.name), ENVIRONMENT_PREFIX + setting.name.upper()
        names = f"`{setting.name}`<br>`{flag}`<br>`{variable}`"
        rows.append(f"| {names} | {setting.allowed} | {default} | {setting.words} |")
    return "\n".join(rows) + "\n"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def example_file() -> str:
    """Return a settings file with every default."""
    blocks = [EXAMPLE_HEAD]
    for setting in all_settings():
        comment = textwrap.fill(
            setting.words,
            WIDTH,
            initial_indent="# ",
            subsequent_indent="# ",
            break_on_hyphens=False,
        )
        blocks.append(f"{comment}\n{setting.name}: {setting.written(setting.example)}\n")
    return "\n".join(blocks)
