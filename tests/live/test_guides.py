"""The commands of README.md and docs/, done as they stand, before a real llama-server."""

import json
import plistlib
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.settings import Settings
from tests.documents.blocks import Block, blocks_for
from tests.lab.conversation import agent_requests, prose, system, tools, user
from tests.lab.models import least_model
from tests.lab.reader import Reader
from tests.lab.server import request
from tests.live.conftest import StartRig, in_long

STARTS_SERVER = re.compile(r"^llama-server |^llama-prefix-cache (serve|run) ", re.M)
KNOWN_ID = "5f0c1a2b"
"""The id of a request on the pages."""
TOOLS = tools(2)
DOCTOR = "llama-prefix-cache doctor --upstream http://127.0.0.1:8080 --slot-save-path ~/slots"
"""Fails unless all is well."""

BLOCKS = blocks_for(__file__)
(FRONT,) = [b for b in BLOCKS if b.page.name == "quickstart.md" and "\nllama-server " in b.text]
STARTING = [b for b in BLOCKS if STARTS_SERVER.search(b.text) or b.language == "xml"]
ASKING = [b for b in BLOCKS if b not in STARTING and b.treatment == "run by"]
SHOWN = [b for b in BLOCKS if b.treatment == "checked by"]


def new_reader(folder: Path, kind: str) -> Reader:
    reader = Reader(folder, least_model(kind))
    (reader.home / "draft.gguf").symlink_to(least_model("full"))
    body = {"messages": [system(150), user(1)], "tools": TOOLS, "max_tokens": 4}
    (reader.home / "first-request.json").write_text(json.dumps(body))
    return reader


def chat(reader: Reader, messages: list[Any]) -> dict[str, Any]:
    body = {"messages": messages, "tools": TOOLS, "max_tokens": 4, "temperature": 0}
    url, path = reader.url("8081"), "/v1/chat/completions"
    status, reply = request(url, "POST", path, body)
    assert status == 200, reply
    return dict(reply)


def about_today(day: int) -> list[Any]:
    return [{"role": "system", "content": f"Today is 2026-11-{day}.\n{prose(7, 120)}"}, user(1)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """Somebody who has done what docs/quickstart.md says, and has had a few requests since."""
    with new_reader(tmp_path_factory.mktemp("served"), "hybrid") as reader:
        *before, serve = FRONT.text.splitlines()
        reader.do("\n".join([*before, "chmod 755 ~/slots"]))  # so that /health has a reason to tell
        reader.do(f"{serve}\nchmod 700 ~/slots")
        for messages in (*agent_requests(2, 1, header=[system(150)]), about_today(20)):
            chat(reader, messages)
        chat(reader, about_today(21))
        yield reader


def command_of(plist: str) -> str:
    """Return the command of a LaunchAgent, which has time enough to save slots, with paths of here."""
    agent = plistlib.loads(plist.encode())
    assert agent["ExitTimeOut"] >= 5 * Settings(slot_save_path="").drain_seconds
    assert agent["RunAtLoad"] and agent["KeepAlive"] == {"SuccessfulExit": False}
    command = shlex.join(agent["ProgramArguments"]).replace("/Users/NAME/models/", "")
    return re.sub(r"\S+/bin/", "", command)


MODELS_OF_BLOCKS = {
    (block.text, kind): block
    for block in STARTING
    if block is not FRONT
    for kind in (block.words or "hybrid").split()
}
"""Each block that starts a server, once for each kind of model that the page names above it."""


@pytest.mark.parametrize(
    ("block", "kind"),
    [(block, kind) for (_, kind), block in MODELS_OF_BLOCKS.items()],
    ids=lambda part: str(part),
)
def test_block_that_starts_a_server(block: Block, kind: str, tmp_path: Path) -> None:
    with new_reader(tmp_path, kind) as reader:
        commands = command_of(block.text) if block.language == "xml" else block.text
        reader.do(commands)
        if not re.search("llama-prefix-cache (run|serve|doctor)", commands):
            reader.do(DOCTOR)
        if not re.search("llama-prefix-cache (run|serve)", commands):
            return
        _, health = request(reader.url("8082"), "GET", "/health")
        assert (health["state"], health["reasons"]) == ("caching", [])
        requests = agent_requests(2, 1, header=[system(150)])
        chat(reader, requests[0])
        usage = chat(reader, requests[1])["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] / 2


def test_blocks_before_a_running_proxy(served: Reader) -> None:
    for block in ASKING:
        if "curl" in block.text and not shutil.which("curl"):
            continue
        _, last = request(served.url("8082"), "GET", "/requests/last")
        commands = block.text.replace(KNOWN_ID, last["request"]["id"])
        printed = served.do(commands, language=block.language)
        assert '{"error"' not in printed, block
        if block.language == "python":
            n_prompt, n_cached = map(int, re.findall(r"\d+", printed.splitlines()[-1]))
            assert n_cached > n_prompt * 0.9


def unlike(shown: Any, real: Any, where: str = "") -> list[str]:
    """Return where what a page shows has other fields, or other kinds of values, than is the case."""
    if isinstance(shown, dict) and isinstance(real, dict):
        missing = [f"{where}.{key}" for key in shown.keys() - real.keys()]
        common = shown.keys() & real.keys()
        return missing + [u for k in common for u in unlike(shown[k], real[k], f"{where}.{k}")]
    if isinstance(shown, list) and isinstance(real, list) and real:
        found = ((unlike(s, r, where) for r in real) for s in shown)
        return [place for each in found for place in min(each, key=len, default=[])]
    if isinstance(shown, list) and isinstance(real, list):
        return [f"{where}: nothing to compare"] if any(isinstance(s, dict) for s in shown) else []
    is_number = isinstance(shown, int | float) and isinstance(real, int | float)
    is_like = None in (shown, real) or is_number or type(shown) is type(real)
    return [] if is_like else [f"{where}: {real!r}"]


def test_documents_that_move_to_the_newest_message_are_told_as_an_edited_message(
    served: Reader,
) -> None:
    """docs/openai-clients.md: what Open WebUI does with documents by default."""
    document, head = f"<source>{prose(3, 200)}</source>\n", system(120, seed=8)
    chat(served, [head, user(1), {"role": "user", "content": document + "What is it about?"}])
    answered = [head, user(1), {"role": "user", "content": "What is it about?"}]
    answered.append({"role": "assistant", "content": "Ships."})
    chat(served, [*answered, {"role": "user", "content": document + "Which ones?"}])
    _, last = request(served.url("8082"), "GET", "/requests/last")
    assert last["request"]["cause"] == "edited message"
    assert last["request"]["n_missed"] > 200


def test_answers_have_the_fields_that_pages_show(served: Reader) -> None:
    for block in SHOWN:
        status, real = request(served.url("8082"), "GET", block.words)
        assert (status, unlike(json.loads(block.text), real)) == (200, []), block


def behind_the_users_back(messages: list[Any]) -> Iterator[list[Any]]:
    """Yield what Open WebUI asks after an answer: instructions first, then the last messages."""
    for seed, n_messages in ((1, 2), (2, 6), (3, 6)):  # title, tags, follow-ups
        history = "\n".join(f"{m['role'].upper()}: {m['content']}" for m in messages[-n_messages:])
        yield [
            {"role": "user", "content": f"### Task:\n{prose(seed, 80)}\n<chat>\n{history}\n</chat>"}
        ]


@pytest.mark.parametrize("n_slots", [1, *in_long(2)])
async def test_chat_goes_on_after_its_title_tags_and_follow_ups(
    start_rig: StartRig, n_slots: int
) -> None:
    """docs/openai-clients.md: at most 40 tokens more than the new ones."""
    async with start_rig("hybrid", n_slots=n_slots) as rig:
        messages = [system(500), user(1, 200)]
        reply = await rig.chat(messages)
        messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
        for task in behind_the_users_back(messages):
            await rig.chat(task)
        n_before = reply["usage"]["prompt_tokens"]
        evaluated = await rig.evaluated()
        reply = await rig.chat([*messages, user(2)])
        n_new = reply["usage"]["prompt_tokens"] - n_before
        assert await rig.evaluated() - evaluated <= n_new + 40 < n_before / 4
        assert n_before > 1400
