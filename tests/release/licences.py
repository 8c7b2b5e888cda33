"""The licences of everything that comes along with the proxy."""

import json
import re
from pathlib import Path

from tests.release.packages import run_module

ALLOWED = (
    *("MIT", "BSD", "Apache", "PSF", "Python Software Foundation", "ISC", "Zlib"),
    *("Mozilla Public License 2.0", "MPL-2.0", "OLDAP", "OpenLDAP", "Unlicense", "CC0"),
)
"""Any of these in each part of a licence's name: a program under MIT may depend on it."""


def unfit_licences(python: Path) -> list[str]:
    """Return the packages in an environment whose licence is not known to be fit for us."""
    listed = run_module("piplicenses", f"--python={python}", "--from=mixed", "--format=json")
    return [
        f"{package['Name']}: {package['License']}"
        for package in json.loads(listed)
        if not is_allowed(package["License"])
    ]


def is_allowed(licence: str) -> bool:
    """Whether every part that has to be complied with is an allowed one."""
    parts = re.split(r"\s+AND\s+|;", licence)
    return all(any(name in part for name in ALLOWED) for part in parts)
