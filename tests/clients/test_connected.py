"""Clients that `connect` has set up, on the real llama-server: fresh, continued, after a restart."""

import pytest

from tests.clients.conftest import StartLab
from tests.clients.connected import CLIENTS, Client, Connected
from tests.clients.script import Answer, Script
from tests.clients.scripted_server import ScriptedServer
from tests.clients.tool_loops import call
from tests.lab.server import find_free_port

BEFORE = (
    "Mend the parser in src/one.py",
    "Write tests for src/two.py, please",
    "Is src/two.py sound?",
)
AFTER, CONTINUED = "What is in src/three.py?", "And what is missing in it?"
FORKED = "How would you do it instead?"
WELL = Answer("All is well.")
LOOK = tuple(
    Answer("", (call("run_shell_command", command=f"seq {i} 40", is_background=False),))
    for i in range(1, 5)
)
ANSWERS = Script(
    {prompt: (WELL,) for prompt in (*BEFORE, CONTINUED, FORKED)} | {AFTER: (*LOOK, WELL)}
)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
async def test_connected_client_evaluates_its_header_once(
    start_plain: StartLab, start_scripted: StartLab, client: Client
) -> None:
    # qwen-code asks again where an answer has no words, and a random model's often has none.
    start = start_scripted if client.name == "qwen-code" else start_plain
    listen = f"127.0.0.1:{find_free_port()}"
    async with start("plain", listen=listen, stabilizers=client.stabilizers) as lab:
        if isinstance(lab.rig.server, ScriptedServer):
            lab.scripted.script = ANSWERS
        connected = Connected(client, lab.folder / client.name)
        said = await connected.connect(lab.rig.base_url, lab.rig.admin_url)
        assert ("came from the cache" in said) is client.has_file

        async def evaluated(prompt: str, how: tuple[str, ...] = client.fresh) -> int:
            before = await lab.rig.evaluated()
            await connected.ask(prompt, lab.repository, how)
            return await lab.rig.evaluated() - before

        n_first, *_, n_second = [await evaluated(p) for p in BEFORE[: client.n_sessions]]
        await lab.rig.restart()
        n_third = await evaluated(AFTER)
        went_on = [
            (how, await evaluated(prompt, how), n_at_most)
            for prompt, how, n_at_most in (
                (CONTINUED, client.continued, client.n_at_most[1]),
                (FORKED, client.forked, client.n_at_most[1]),
                (client.compact_prompt, client.compacted, client.n_compacting),
            )
            if how
        ]
        print(f"\n{client.name}: {n_first}, {n_second}; {n_third}, {went_on}")
        n_fresh, _ = client.n_at_most
        assert n_first > 10 * n_fresh and max(n_second, n_third) <= n_fresh
        assert all(n_evaluated <= n_at_most for _, n_evaluated, n_at_most in went_on)
