"""The table of settings and the example of a settings file, from the schema."""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Meta

from proxy.settings import Settings, allowed, metas_of, written

WIDTH = 104

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
    def description(self) -> str:
        """Return what it is, in a sentence."""
        return next((m.description for m in self.metas if m.description), "")

    @property
    def words(self) -> str:
        """Return the description and whatever more there is to say."""
        more = [m.extra["more"] for m in self.metas if m.extra and "more" in m.extra]
        return " ".join([self.description, *more])

    @property
    def example(self) -> Any:
        """Return the default, or an example where there is none."""
        if self.default is not msgspec.NODEFAULT:
            return self.default
        return next(example for m in self.metas if m.examples for example in m.examples)


def all_settings() -> Iterator[Setting]:
    """Yield every setting, in the order of the schema."""
    for field in msgspec.structs.fields(Settings):
        type_, metas = metas_of(field.name)
        yield Setting(field.name, type_, field.default, tuple(metas))


def settings_table() -> str:
    """Return the settings as a Markdown table; the example file says more of each."""
    rows = ["| setting | allowed | default | what it does |", "|---|---|---|---|"]
    for setting in all_settings():
        is_needed = setting.default is msgspec.NODEFAULT
        default = (
            "none: must be given" if is_needed else f"`{written(setting.name, setting.default)}`"
        )
        rows.append(
            f"| `{setting.name}` | {allowed(setting.name)} | {default} | {setting.description} |"
        )
    return "\n".join(rows) + "\n"


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
        blocks.append(f"{comment}\n{setting.name}: {written(setting.name, setting.example)}\n")
    return "\n".join(blocks)
