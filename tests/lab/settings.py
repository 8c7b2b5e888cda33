"""Settings as a command gets them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proxy.settings import Settings, complete_settings, merge_settings


def load_settings(
    flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None
) -> Settings:
    """Return the settings from all sources; raises SettingsError naming the first that is wrong."""
    return complete_settings(merge_settings(flags, environment, file))
