"""Repeatable text: passages of the Python standard library's source, which the vocabulary was trained on.

Deterministic for one Python version, and without the network.
"""

import functools
import re
import sysconfig
from pathlib import Path

MODULES = """
    argparse ast calendar configparser copy csv dataclasses datetime difflib dis doctest enum
    fractions ftplib gettext heapq inspect ipaddress locale mailbox optparse pathlib pdb pickle
    platform plistlib pprint random shutil smtplib socket statistics string subprocess tarfile
    tempfile textwrap threading tokenize traceback turtle typing uuid zipfile
""".split()
_STRIDE = 1_000_003
"""Prime, so that successive seeds begin far apart, and none twice."""
_WORD = re.compile(r"\b[A-Za-z]{3}")
_LONGEST_GAP = 10_000
"""There is a word in every stretch of this length."""


@functools.cache
def corpus() -> str:
    """Return the source of all modules, one after the other."""
    folder = Path(sysconfig.get_path("stdlib"))
    # Some are packages in later versions of Python.
    files = ((folder / f"{name}.py", folder / name / "__init__.py") for name in MODULES)
    found = (module if module.exists() else package for module, package in files)
    return "".join(file.read_text(encoding="utf-8") for file in found)


def passage(seed: int, n_characters: int) -> str:
    """Return *n_characters* of source, from the beginning of a word on."""
    text = corpus()
    begin = seed * _STRIDE % (len(text) - n_characters - _LONGEST_GAP)
    begin = next(_WORD.finditer(text, begin)).start()
    return text[begin : begin + n_characters]
