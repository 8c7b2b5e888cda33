"""llama-server's --models-preset: an INI file with flags for each model of a router (common/preset.cpp).

Owns: how the file is read, as far as its flags are known. Pure. What cannot be read is left for
llama-server to complain about.
"""

import configparser
from collections.abc import Sequence

from proxy.core.launch import OFF, ON, Given
from proxy.upstream.flags import Option, is_true

_BEFORE_ALL = "\0"


def read_presets(text: str, options: Sequence[Option]) -> dict[str, dict[str, Given]]:
    """Return what each section sets; keys are flags without their dashes, or names of variables."""
    parser = configparser.ConfigParser(
        delimiters=("=",), interpolation=None, strict=False, default_section=_BEFORE_ALL
    )
    try:
        lines = (line.strip() for line in text.splitlines())  # indented lines go on nothing
        parser.read_string("\n".join((f"[{_BEFORE_ALL}]", *lines)))
    except configparser.Error:
        return {}
    by_key = {name.lstrip("-"): option for option in options for name in option.names}
    by_key |= {o.environment.lower(): o for o in options if o.environment}
    presets: dict[str, dict[str, Given]] = {}
    for section in parser.sections():
        given = presets.setdefault(section, {})
        for key, value in parser[section].items():
            if (option := by_key.get(key)) and key not in parser.defaults():
                read = _switched(key, value) if option.is_switch else value
                given |= dict.fromkeys(option.names, Given(f"[{section}] {key}", read))
    return presets


def _switched(key: str, value: str) -> str:
    return ON if is_true(value) != key.startswith("no-") else OFF
