"""The commands of README.md and docs/ that need the real Claude Code."""

import json
from pathlib import Path

from tests.clients.claude_code import PROGRAM, QUIET, Outcome
from tests.clients.conftest import Lab, StartLab
from tests.clients.programs import find_program, run
from tests.documents.blocks import Block, blocks_for

ASKED = "What is in src/three.py?"
HEADLESS = '#!/bin/sh\nexec {program} -p "{prompt}" --output-format json\n'
"""On the pages `claude` opens its window; here it is asked one thing and ends."""


async def do(block: Block, lab: Lab) -> Outcome:
    """Do what a block says, in a repository."""
    home = lab.folder / "claude-code"
    (home / "bin").mkdir(parents=True, exist_ok=True)
    script = home / "bin" / "claude"
    script.write_text(HEADLESS.format(program=find_program(PROGRAM), prompt=ASKED))
    script.chmod(0o755)
    commands = block.text.replace("http://127.0.0.1:8081", lab.rig.base_url)
    environment = {"HOME": str(home), "PATH": f"{script.parent}:/usr/bin:/bin", **QUIET}
    environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = "64"
    printed = await run(Path("/bin/sh"), ["-euc", commands], lab.repository, environment)
    return Outcome(json.loads(printed))


async def test_claude_code_is_cached_when_started_as_pages_say(start_plain: StartLab) -> None:
    async with start_plain("plain") as lab:
        first, *others = [await do(block, lab) for block in blocks_for(__file__)]
        assert first.n_evaluated > 10_000 and others
        assert [o for o in others if o.n_evaluated > 1500 or o.n_cached < 10_000] == []
