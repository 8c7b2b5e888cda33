"""Every fenced block of README.md and docs/ is run, checked, or says why not; and the plain checks."""

import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner

from proxy.__main__ import main
from tests.documents.blocks import PAGES, TEXT, Block, all_blocks, blocks_for
from tests.documents.files import REPOSITORY
from tests.lab.settings import load_settings

REASONS = (
    *("no container engine", "systemd", "macOS", "a GPU", "another machine", "the network"),
    "another program",
)
"""What is not here; a reason on a page begins with one of them."""
COMMAND = re.compile(r"\bllama-prefix-cache ([a-z]+)((?: [^`|&;#>\n]*)?)")


def lack(block: Block) -> str | None:
    """Return what a block lacks to be known to work, or None."""
    if block.language == TEXT and block.treatment is None:
        return None
    if not block.language:
        return "its language is missing"
    if block.treatment is None:
        return "no test and no reason stands above it"
    if block.tested_by is None:
        return None if block.words.startswith(REASONS) else f"no reason: {block.words!r}"
    if not block.tested_by.is_file():
        return f"{block.tested_by} is not there"
    is_taken = "blocks_for(__file__)" in block.tested_by.read_text()
    return None if is_taken else f"{block.tested_by} does not take it"


def test_every_block_is_tested_or_says_why_not() -> None:
    lacking = {str(block): lack(block) for block in all_blocks()}
    assert {block: why for block, why in lacking.items() if why} == {}


def test_block_without_test_or_reason_is_named() -> None:
    page, here = PAGES[0], Path(__file__)
    assert lack(Block(page, 1, TEXT, "")) is None
    assert lack(Block(page, 1, "sh", "", "not run here", None, "no container engine")) is None
    assert lack(Block(page, 1, "sh", "", "run by", here)) is None
    for block in (
        Block(page, 1, "", ""),
        Block(page, 1, "sh", ""),
        Block(page, 1, "sh", "", "not run here", None, "no time"),
        Block(page, 1, "sh", "", "run by", here.with_name("nothing.py")),
        Block(page, 1, "sh", "", "run by", here.with_name("builders.py")),
    ):
        assert lack(block)


def check_make(block: Block) -> None:
    for line in block.text.splitlines():
        subprocess.run(
            # Else each recipe that names a Python would start several to find one.
            ["make", "--dry-run", "PYTHON=python3", *shlex.split(line, comments=True)[1:]],
            cwd=REPOSITORY,
            check=True,
            capture_output=True,
        )


def check_settings(block: Block, directory: Path) -> None:
    path = directory / "config.yaml"
    path.write_text(block.text)
    given = {"slot_save_path": str(directory), "upstream": "http://127.0.0.1:8080"}
    loaded = load_settings(given, {}, path)
    named = yaml.safe_load(block.text)
    assert {name: str(getattr(loaded, name)) for name in named} == {
        name: str(value) for name, value in named.items()
    }


def check_client(block: Block) -> None:
    """Another program's configuration can only be parsed here, and has the proxy's address in it."""
    parse: dict[str, Callable[[str], Any]] = {"yaml": yaml.safe_load, "json": json.loads}
    read = {**parse, "toml": tomllib.loads}[block.language](block.text)
    assert isinstance(read, dict)
    assert {"http://127.0.0.1:8081/v1", "local-model"} <= set(re.findall(r"[\w:/.-]+", str(read)))


def check_completion(block: Block) -> None:
    variable, name = re.findall(r"(\w+)=(\w+_source) llama-prefix-cache", block.text)[0]
    script = CliRunner(env={variable: name}).invoke(main, prog_name="llama-prefix-cache").output
    assert variable in script and "llama-prefix-cache" in script


def test_blocks_that_only_need_to_be_read(tmp_path: Path) -> None:
    for block in blocks_for(__file__):
        if block.words == "client":
            check_client(block)
        elif block.language in ("zsh", "fish"):
            check_completion(block)
        elif block.language == "yaml":
            check_settings(block, tmp_path)
        else:
            check_make(block)


def unknown_parts(name: str, arguments: str) -> list[str]:
    """Return the options of one of our commands, as a page writes it, that it does not have."""
    command = main.commands[name]
    known = {"--help", *(option for part in command.params for option in part.opts)}
    own = arguments.split(" -- ")[0]
    return [option for option in re.findall(r"(?<=\s)--[a-z-]+", own) if option not in known]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_have_the_options_that_pages_give_them(page: Path) -> None:
    text = page.read_text().replace("\\\n", " ")
    told = [found for found in COMMAND.findall(text) if found[0] in main.commands]
    assert isinstance(main, click.Group)
    assert {found: wrong for found in told if (wrong := unknown_parts(*found))} == {}
