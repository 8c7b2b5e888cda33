"""What a build says of itself, which licences may come along with it, and how fast it is in use."""

from click.testing import CliRunner

from proxy import __version__
from proxy.__main__ import main
from tests.deployment.run_bare import MAX_COMMANDS, read_commands
from tests.release.licences import is_allowed


def test_version_names_the_build() -> None:
    told = CliRunner().invoke(main, ["--version"]).output
    assert told.startswith(f"llama-prefix-cache {__version__}")


def test_licences_that_ask_for_more_than_ours_does_are_named() -> None:
    fit = ["MIT", "MIT License; Apache Software License", "Apache-2.0 AND MIT", "OLDAP-2.8"]
    unfit = [
        "UNKNOWN",
        "GNU General Public License v3 (GPLv3)",
        "MIT AND GPL-3.0-only",
        "BSD; AGPL",
    ]
    assert [is_allowed(licence) for licence in fit] == [True] * len(fit)
    assert [is_allowed(licence) for licence in unfit] == [False] * len(unfit)


def test_quickstart_is_short() -> None:
    commands = read_commands()
    assert len(commands) <= MAX_COMMANDS
    assert "deploy/opencode.json" in commands[-1]
