"""Where settings come from besides the command line: a YAML file and the environment."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from proxy.errors import SettingsError

ENVIRONMENT_PREFIX = "LLAMA_PREFIX_CACHE_"


def read_file(file: Path) -> dict[str, Any]:
    """Return the `name: value` lines of a YAML file; raises SettingsError."""
    try:
        content = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"{file}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise SettingsError(f"{file}: expected `name: value` lines")
    return content


def read_environment(environment: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """Return the settings among *names* that are set; raises SettingsError for one that does not exist."""
    keys = {ENVIRONMENT_PREFIX + name.upper(): name for name in names}
    for key in environment:
        if key.startswith(ENVIRONMENT_PREFIX) and key not in {*keys, ENVIRONMENT_PREFIX + "CONFIG"}:
            raise SettingsError(f"environment: {key} is not a setting; allowed: {', '.join(names)}")
    return {name: environment[key] for key, name in keys.items() if key in environment}
