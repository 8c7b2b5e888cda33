"""llama-server's command line: which options a build knows, and what a command sets.

Owns: the layout of --help, and how llama-server reads its arguments (common/arg.cpp). Pure. Builds differ
in their options, so only the options in --help are known. Arguments that cannot be read are left for
llama-server to refuse.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from proxy.core.launch import OFF, ON, Given

_NAME = r"--?[A-Za-z][\w.-]*"
_NAMES = re.compile(rf"({_NAME}(?:,\s*{_NAME})*)(?:,?\s|$)")
_TWO_VALUES = re.compile(r"[A-Z]+ [A-Z]+")
_ENVIRONMENT = re.compile(r"\(env: (\w+)\)")
_TRUE = frozenset(("on", "enabled", "true", "1"))


@dataclass(frozen=True, slots=True)
class Flag:
    """One option with all its names; a switch takes no value and may have names that turn it off."""

    names: tuple[str, ...]
    n_values: int
    environment: str | None = None

    @property
    def is_switch(self) -> bool:
        return self.n_values == 0

    @property
    def can_be_turned_off(self) -> bool:
        return self.is_switch and any(map(_turns_off, self.names))


def parse_help(text: str) -> list[Flag]:
    """Return the options in the text of --help.

    An option begins at the left edge with its names and a placeholder for its value. Two or more spaces or
    the end of the line separate them from the description, which continues in indented lines.
    """
    options: list[Flag] = []
    for entry in re.split(r"\n(?=\S)", text):
        if names := _NAMES.match(line := entry.partition("\n")[0]):
            value = re.split(r"\s{2,}|^\s", line[names.end() :])[0]
            n_values = 2 if _TWO_VALUES.fullmatch(value) else 1 if value else 0
            found = _ENVIRONMENT.search(entry)
            all_names = tuple(re.findall(_NAME, names[1]))
            options.append(Flag(all_names, n_values, found[1] if found else None))
    return options


def variables_of(options: Iterable[Flag]) -> dict[str, str]:
    """Return the environment variables of the options, by each name of the option."""
    return {name: o.environment for o in options if o.environment for name in o.names}


def known_names(options: Iterable[Flag]) -> frozenset[str]:
    return frozenset(name for option in options for name in option.names)


def read_given(
    options: Sequence[Flag], arguments: Sequence[str], environment: Mapping[str, str]
) -> dict[str, Given]:
    """Return the options that *arguments*, or else *environment*, set, under every name of each option.

    If an option is given twice, the last one counts. Arguments that are no option are left for llama-server
    to refuse.
    """
    given: dict[str, Given] = {}
    for option in options:
        if found := _from_environment(option, environment):
            given |= dict.fromkeys(option.names, found)
    by_name = {name: option for option in options for name in option.names}
    index = 0
    while index < len(arguments):
        written = arguments[index]
        # llama-server takes --cache_ram for --cache-ram, and no --name=value.
        name = written.replace("_", "-") if written.startswith("--") else written
        index += 1
        if known := by_name.get(name):
            switched = OFF if _turns_off(name) else ON
            value = switched if known.is_switch else "".join(arguments[index : index + 1])
            given |= dict.fromkeys(known.names, Given(written, value))
            index += known.n_values
    return given


def _from_environment(option: Flag, environment: Mapping[str, str]) -> Given | None:
    name = option.environment or ""
    negative = name.replace("LLAMA_ARG_", "LLAMA_ARG_NO_")
    if option.can_be_turned_off and negative in environment:
        return Given(negative, OFF)
    if name not in environment:
        return None
    value = environment[name]
    if option.is_switch:
        value = ON if value in _TRUE else OFF
        if value == OFF and not option.can_be_turned_off:
            return None
    return Given(name, value)


def _turns_off(name: str) -> bool:
    return name.startswith(("--no-", "-no"))
