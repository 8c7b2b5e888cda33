"""Every named cause of a miss, produced on purpose before a real llama-server, is named."""

import asyncio
import json
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from click.testing import CliRunner, Result
from structlog.testing import capture_logs

from proxy.__main__ import main
from proxy.core.model import Prompt
from proxy.core.rates import Transfer, UnitCost
from tests.lab.at_once import sent_at_once
from tests.lab.conversation import Message, answer, prose, system, tool_call, tool_result, tools
from tests.lab.rig import Rig
from tests.live.conftest import StartRig

Body = dict[str, Any]
IDS = [1 + 37 * i % 331 for i in range(800)]
NOTE_BEFORE_LAST_MESSAGE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    f"{{% if loop.last %}}{prose(9, 120)}\n{{% endif %}}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = tools(3, 8)
LINES = {
    "date": (
        "It is Friday, 21 November 2026, 23:59:58.",
        "It is Saturday, 22 November 2026, 0:00:03.",
    ),
    "system text changed": ("The user is called Bob.", "The user is called Alice."),
}


def asked(seed: int, text: str = "") -> Message:
    return {"role": "user", "content": f"{text}{prose(1000 + seed, 40)}"}


def chat(*messages: Message, seed: int, line: str = "", own_tools: list[Any] | None = None) -> Body:
    """Return a request whose system prompt has a *line* near its beginning."""
    head = {"role": "system", "content": f"Agent {seed}.\n{line}\n{prose(seed, 60)}"}
    return {"messages": [head, *messages], "tools": TOOLS if own_tools is None else own_tools}


def by_line(seed: int, lines: tuple[str, str]) -> tuple[Body, Body]:
    turn = [asked(seed)]
    after = [*turn, answer(seed), asked(seed + 1)]
    return chat(*turn, seed=seed, line=lines[0]), chat(*after, seed=seed, line=lines[1])


def by_tools(seed: int, changed: list[Any]) -> tuple[Body, Body]:
    turn = [asked(seed)]
    after = [*turn, answer(seed), asked(seed + 1)]
    return chat(*turn, seed=seed), chat(*after, seed=seed, own_tools=changed)


def described(tool: Any, text: str) -> Any:
    return {**tool, "function": {**tool["function"], "description": text}}


def by_history() -> dict[str, tuple[Body, Body]]:
    def talk(seed: int) -> list[Message]:
        return [m for i in range(3) for m in (asked(seed + i), answer(seed + i))]

    edited = [*talk(300)[:2], asked(390), *talk(300)[3:5]]
    reminder = f"<system-reminder>\n{prose(31, 40)}\n</system-reminder>\n"
    reminded = [asked(320, reminder), answer(320)]
    moved = [asked(320), answer(320), asked(321, reminder)]
    reasoned = [asked(330), tool_call(330), tool_result(330, 80)]
    return {
        "edited message": (chat(*talk(300)[:5], seed=30), chat(*edited, seed=30)),
        "truncated history": (
            chat(*talk(310)[:5], seed=31),
            chat(*talk(310)[2:], asked(391), seed=31),
        ),
        "reminder moved": (chat(*reminded, asked(322), seed=32), chat(*moved, seed=32)),
        "reasoning dropped": (
            chat(*reasoned, seed=33),
            chat(*reasoned, answer(331), asked(332), seed=33),
        ),
        "system text changed": (
            chat(*talk(340)[:3], seed=34),
            {"messages": [system(150, seed=99), *talk(340)[:5]], "tools": TOOLS},
        ),
        "hit": (chat(*talk(350)[:3], seed=35), chat(*talk(350)[:5], seed=35)),
        "first sight": (chat(asked(360), seed=36), chat(asked(361), seed=36)),
    }


BY_CHANGE: dict[str, tuple[Body, Body]] = {
    **{cause: by_line(10 + i, lines) for i, (cause, lines) in enumerate(LINES.items())},
    "tool order changed": by_tools(20, [*TOOLS[1:], TOOLS[0]]),
    "tool text changed": by_tools(21, [described(TOOLS[0], "Something else."), *TOOLS[1:]]),
    "tools added or removed": by_tools(22, TOOLS[1:]),
    **by_history(),
}


async def explained(rig: Rig) -> Any:
    """Return the explanation of the last request, once its slot is given back."""
    await rig.settled()
    async with rig.client.get(rig.admin_url + "/requests/last") as reply:
        assert reply.status == 200
        return await reply.json()


async def cause_of_second(rig: Rig, first: Body, second: Body, path: str) -> str:
    limits = {"max_tokens": 2, "temperature": 0}
    for body in (first, second):
        await rig.post(path, {**body, **limits})
    explanation = await explained(rig)
    record, divergence = explanation["request"], explanation["divergence"]
    if record["n_missed"]:
        assert record["n_missed"] <= record["evaluated"]
        assert divergence is not None and divergence["known"] != divergence["now"]
    return str(record["cause"])


async def again(rig: Rig, seed: int) -> str:
    """Send the prompt of *seed* once more; return its cause."""
    body = {**chat(asked(seed), seed=seed), "max_tokens": 2}
    await rig.post("/v1/chat/completions", body)
    return str((await explained(rig))["request"]["cause"])


async def fill_slots(rig: Rig, seed: int, n_words: int = 100) -> None:
    """Use all slots for something else, so that what was in them is in files."""
    others = [[system(n_words, seed=500 + seed + i), asked(500 + seed + i)] for i in range(2)]
    with sent_at_once(len(others)):
        await asyncio.gather(*(rig.chat(messages) for messages in others))
    await rig.settled()


async def of_eviction(rig: Rig) -> str:
    """Let a small budget push out the state of a prompt, once others are in the slots."""
    await start_again(rig, max_store_bytes=1 << 20)
    await again(rig, 50)
    for number in range(3):
        await fill_slots(rig, 50 + 10 * number, n_words=600)  # worth more for each byte
    assert rig.sample("evictions_total", reason="budget")
    return await again(rig, 50)


async def start_again(rig: Rig, **settings: Any) -> None:
    await rig.stop_proxy()
    rig.settings = msgspec.structs.replace(rig.settings, **settings)
    await rig.start_proxy()


async def of_refusal(rig: Rig) -> str:
    await again(rig, 55)
    await fill_slots(rig, 55)
    store = rig.running.store
    assert store is not None
    for checkpoint in list(store):
        store.files.path(checkpoint.file_name).write_bytes(b"not a state")
    return await again(rig, 55)


async def of_disagreement(rig: Rig) -> str:
    """Let the proxy believe that the prompt has a token more than llama-server makes of it."""
    process = rig.running.server.process
    assert process is not None
    read = process.reader.read

    async def read_wrongly(*arguments: Any) -> Prompt:
        prompt = await read(*arguments)
        return replace(prompt, tokens=prompt.tokens + array("i", [1]))

    process.reader.read = read_wrongly  # type: ignore
    try:
        return await again(rig, 60)
    finally:
        process.reader.read = read  # type: ignore


async def by_tokens(rig: Rig, *prompts: list[int]) -> str:
    """Send prompts without any text; return the cause of the last one."""
    for tokens in prompts:
        await rig.post("/completion", {"prompt": tokens, "n_predict": 1})
        await rig.settled()
    return str((await explained(rig))["request"]["cause"])


async def of_slow_disk(rig: Rig) -> str:
    """Let restores be slower than anything, as far as the proxy knows."""
    process = rig.running.server.process
    assert process is not None
    await again(rig, 75)
    await fill_slots(rig, 75)
    measured = process.rates
    slow = Transfer(UnitCost(60.0, 1.0), UnitCost(1e-9, 1.0))
    process.rates = replace(measured, warm_restore=slow, cold_restore=slow)
    try:
        return await again(rig, 75)
    finally:
        process.rates = measured


async def of_slot_in_use(rig: Rig) -> str:
    """Ask the same again while the slot that has it goes on writing an answer."""
    await cause_of(rig, 80)
    body = chat(asked(80), answer(80), asked(81), seed=80)
    body |= {"max_tokens": 20_000, "ignore_eos": True, "stream": True}
    other = chat(asked(80), answer(80), asked(82), seed=80)
    async with rig.client.post(rig.base_url + "/v1/chat/completions", json=body) as writing:
        await writing.content.readline()
        await rig.post("/v1/chat/completions", {**other, "max_tokens": 1})
        async with rig.client.get(rig.admin_url + "/requests/last") as reply:
            return str((await reply.json())["request"]["cause"])


async def of_no_file(rig: Rig) -> str:
    """Give the slot to others when nothing may be written."""
    await cause_of(rig, 85)
    others = [[system(150, seed=585 + i), asked(585 + i)] for i in range(2)]
    with sent_at_once(len(others)):
        await asyncio.gather(*(rig.chat(messages) for messages in others))
    return await cause_of(rig, 85)


async def of_other_client(rig: Rig) -> str:
    """Let somebody use both slots past the proxy."""
    await cause_of(rig, 90)
    for slot in range(2):
        body = {"prompt": IDS[100 * slot : 500], "n_predict": 1, "id_slot": slot}
        status, _ = await asyncio.to_thread(rig.server.request, "POST", "/completion", body)
        assert status == 200
    return await cause_of(rig, 90)


async def of_restart(rig: Rig) -> str:
    """Lose llama-server before any of its slots is saved."""
    await cause_of(rig, 70)
    await asyncio.to_thread(rig.server.stop)
    await asyncio.to_thread(rig.server.start)
    return await cause_of(rig, 70)


async def cause_of(rig: Rig, seed: int) -> str:
    """Send the prompt of *seed*; return its cause without waiting for slots to be saved."""
    await rig.post("/v1/chat/completions", {**chat(asked(seed), seed=seed), "max_tokens": 2})
    async with rig.client.get(rig.admin_url + "/requests?limit=1") as reply:
        (record,) = (await reply.json())["requests"]
        return str(record["cause"])


async def printed(rig: Rig, *arguments: str) -> Result:
    """Return what the command prints of the last request."""
    command = ["explain", *arguments, "--admin", rig.admin_url]
    return await asyncio.to_thread(CliRunner().invoke, main, command)


async def test_every_cause_is_named_where_it_is_produced(start_rig: StartRig) -> None:
    found: dict[str, str] = {}
    with capture_logs() as log:
        await produce_all(start_rig, found)
    assert found == {cause: cause for cause in found}
    ids = [line["id"] for line in log if line["event"] == "request"]
    assert len(ids) == len(set(ids)) >= 2 * len(found)
    assert "callers" not in repr(log), "it is in every prompt"


async def produce_all(start_rig: StartRig, found: dict[str, str]) -> None:
    async with start_rig("hybrid", stabilizers="none") as rig:
        for cause, (first, second) in BY_CHANGE.items():
            found[cause] = await cause_of_second(rig, first, second, "/v1/chat/completions")
        changed = by_line(40, LINES["system text changed"])
        await cause_of_second(rig, *changed, "/v1/chat/completions")
        result = await printed(rig)
        assert "cause: system text changed, in the system prompt" in result.output
        assert "\n- " in result.output and "\n+ " in result.output
        as_json = await printed(rig, "last", "--json")
        assert json.loads(as_json.output)["request"]["cause"] == "system text changed"
        assert (await printed(rig, "00000000")).exit_code == 1
        found["restore refused"] = await of_refusal(rig)
        counted = rig.sample("misses_total", cause="date", part="system")
        found["no state so far back"] = await by_tokens(rig, IDS[:700], IDS[:400])
        found["unknown"] = await by_tokens(rig, IDS[100:800], [*IDS[100:500], *IDS[:300]])
        found["cheaper to evaluate"] = await of_slow_disk(rig)
        found["tokenization disagreement"] = await of_disagreement(rig)
        found["state evicted"] = await of_eviction(rig)
        await start_again(rig, idle_save_seconds=3600.0, max_write_bytes_per_day=1)
        found["slot in use"] = await of_slot_in_use(rig)
        found["state not kept"] = await of_no_file(rig)
        found["slot held less"] = await of_other_client(rig)
        found["slot lost by a restart"] = await of_restart(rig)
    assert counted == 1


async def test_causes_on_a_server_that_saves_nothing_are_named(
    start_rig: StartRig, tmp_path: Path
) -> None:
    (tmp_path / "moving.jinja").write_text(NOTE_BEFORE_LAST_MESSAGE)
    template = ("--chat-template-file", str(tmp_path / "moving.jinja"))
    async with start_rig("full", has_slot_save_path=False, extra_args=template) as rig:
        turn = [asked(95), answer(95)]
        first, second = chat(*turn[:1], seed=95), chat(*turn, asked(96), seed=95)
        moved = await cause_of_second(rig, first, second, "/v1/chat/completions")
        assert moved == "rendered otherwise"
        await cause_of(rig, 97)
        with sent_at_once(2):
            await asyncio.gather(*(cause_of(rig, seed) for seed in (98, 99)))
        assert await cause_of(rig, 97) == "nothing can be restored"


async def test_prompt_near_a_state_is_not_shown_beside_a_prompt_of_something_else(
    start_rig: StartRig,
) -> None:
    """The text of a stored state is not known: that of an unrelated prompt explains nothing."""
    stored, alike = (prose(700, 400) + words for words in (" One.", " And two, or three."))

    async def ask(seed: int, text: str, own_tools: list[Any]) -> Any:
        body = {"messages": [{"role": "system", "content": text}, asked(seed)], "tools": own_tools}
        await rig.post("/v1/chat/completions", {**body, "max_tokens": 2})
        return await explained(rig)

    async with start_rig("hybrid") as rig:
        await ask(700, f"{stored}\n{prose(701, 300)}", TOOLS)
        await fill_slots(rig, 70)
        await start_again(rig)
        await ask(710, f"You write titles.\n{prose(702, 300)}", [])
        found = await ask(700, f"{alike}\n{prose(703, 300)}", TOOLS)
    assert found["request"]["cause"] == "no state so far back"
    assert found["nearest"]["id"] is None and found["nearest"]["n_common"] > 400
    assert found["divergence"] is None
