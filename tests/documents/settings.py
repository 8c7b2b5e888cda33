"""The table of settings and the example of a settings file, from the schema."""

import textwrap

from proxy.settings import NAMES, SCHEMA, allowed, written

WIDTH = 104

EXAMPLE_HEAD = """\
# llama-prefix-cache: every setting with its default.
# Use it with `llama-prefix-cache serve --config FILE`. Flags (--max-store-bytes) beat the environment
# (LLAMA_PREFIX_CACHE_MAX_STORE_BYTES), which beats this file. An unknown name is refused at start.
# Written by `make docs` from proxy/settings.py.
"""


def words(name: str) -> str:
    """Return the description of a setting and whatever more there is to say."""
    return f"{SCHEMA[name]['description']} {SCHEMA[name]['more']}".strip()


def settings_table() -> str:
    """Return the settings as a Markdown table; the example file says more of each."""
    rows = ["| setting | allowed | default | what it does |", "|---|---|---|---|"]
    for name in NAMES:
        is_needed = "default" not in SCHEMA[name]
        default = (
            "none: must be given" if is_needed else f"`{written(name, SCHEMA[name]['default'])}`"
        )
        rows.append(f"| `{name}` | {allowed(name)} | {default} | {SCHEMA[name]['description']} |")
    return "\n".join(rows) + "\n"


def example_file() -> str:
    """Return a settings file with every default."""
    blocks = [EXAMPLE_HEAD]
    for name in NAMES:
        comment = textwrap.fill(
            words(name), WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
        )
        example = SCHEMA[name].get("default", *SCHEMA[name].get("examples", [None]))
        blocks.append(f"{comment}\n{name}: {written(name, example)}\n")
    return "\n".join(blocks)
