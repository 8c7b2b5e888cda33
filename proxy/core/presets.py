"""How what is added to a router's flags goes together with its presets, the flags for single models.

Owns: which of the two is stronger. A router holds its own command line above the presets, and those
above variables (server-models.cpp); so what the proxy adds becomes variables, and overrides nothing.
"""

import posixpath
from collections.abc import Mapping

from proxy.core.launch import OFF, ON, Given, Launch

Presets = Mapping[str, Mapping[str, Given]]
"""What each section sets, under every name of an option."""

ALL_MODELS = "*"
_SAVE_PATH = "--slot-save-path"
_CHECKPOINTS = "--ctx-checkpoints"
_OF_MODELS = frozenset(
    (_SAVE_PATH, _CHECKPOINTS, "--swa-checkpoints", "--parallel", "--kv-unified", "--cache-ram")
    + ("--cache-idle-slots", "--metrics", "--slots", "--no-slots", "--sleep-idle-seconds")
)
"""What a launch looks at that is a matter of models, not of the router."""


def given_to_all(given: Mapping[str, Given], presets: Presets) -> dict[str, Given]:
    """Return what holds for every model of which no preset says otherwise."""
    preset = {n: value for n, value in presets.get(ALL_MODELS, {}).items() if n in _OF_MODELS}
    return {**given, **preset, **_flags(given)}


def heed_presets(
    launch: Launch,
    given: Mapping[str, Given],
    presets: Presets,
    variables: Mapping[str, str],
    working_directory: str,
) -> None:
    """Make a launch leave the presets what they are; *variables* are those that stand for options."""
    flags = _flags(given)
    for section, preset in presets.items():
        path, checkpoints = preset.get(_SAVE_PATH), preset.get(_CHECKPOINTS)
        if path and _SAVE_PATH not in flags and section != ALL_MODELS:
            written = posixpath.normpath(posixpath.join(working_directory, path.value))
            if written != launch.slot_save_path:
                launch.conflicts.append(
                    f"{path} is not {launch.slot_save_path}, where the proxy keeps the states of all "
                    "models: leave it out"
                )
        if checkpoints and _CHECKPOINTS not in flags and checkpoints.value.isdecimal():
            n_checkpoints = min(launch.n_context_checkpoints, int(checkpoints.value))
            launch.n_context_checkpoints = n_checkpoints
    _add_as_variables(launch, variables)


def _flags(given: Mapping[str, Given]) -> dict[str, Given]:
    return {name: value for name, value in given.items() if value.is_flag}


def _add_as_variables(launch: Launch, variables: Mapping[str, str]) -> None:
    for addition in list(launch.additions):
        name, *values = addition
        if name in variables and name != "--port":
            switched = OFF if name.startswith("--no-") else ON
            launch.environment[variables[name]] = values[0] if values else switched
            launch.additions.remove(addition)
