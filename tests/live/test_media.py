"""Conversations with an image, on a real llama-server with a tiny image encoder."""

from pathlib import Path
from typing import Any

import pytest

from tests.lab import responses_bodies
from tests.lab.conversation import answer, system, user
from tests.lab.media import build_projector, image_part
from tests.lab.rig import Rig
from tests.lab.waiting import until
from tests.live.conftest import ONE_KIND, StartRig

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
SLACK_TOKENS = 64
N_TEXT_WORDS = 600


def asking(image: int) -> list[Any]:
    parts = [{"type": "text", "text": "Look at this:"}, image_part(image)]
    content = [*parts, {"type": "text", "text": "What is it?"}]
    return [system(N_TEXT_WORDS), {"role": "user", "content": content}]


def as_asked(route: str, messages: list[Any]) -> dict[str, Any]:
    """Return the body of a chat as a client of *route* sends it."""
    if route == CHAT:
        return {"messages": messages, "max_tokens": 6}
    turns = [{**message, "content": as_parts(route, message)} for message in messages[1:]]
    told = messages[0]["content"]
    if route == MESSAGES:
        return {"system": told, "messages": turns, "max_tokens": 6}
    turns = [{**turn, "type": "message"} for turn in turns]
    return {"instructions": told, "input": turns, "max_output_tokens": 6}


def as_parts(route: str, message: dict[str, Any]) -> Any:
    if isinstance(message["content"], str):
        return message["content"]
    return [as_part(route, part) for part in message["content"]]


def as_part(route: str, part: dict[str, Any]) -> dict[str, Any]:
    if "text" in part:
        return part if route == MESSAGES else {**part, "type": "input_text"}
    url = part["image_url"]["url"]
    if route == RESPONSES:
        return responses_bodies.image(url)
    kind, _, data = url.removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


async def ask(rig: Rig, messages: list[Any], route: str = CHAT) -> tuple[str, int, int]:
    """Return what the answer says, how long the prompt was, and how much of it was evaluated."""
    before = await rig.evaluated()
    reply = await rig.post(route, {**as_asked(route, messages), "temperature": 0})
    n_evaluated = await rig.evaluated() - before
    usage = reply["usage"]
    n_prompt = usage.get("prompt_tokens") or usage["input_tokens"]
    n_prompt += usage.get("cache_read_input_tokens", 0) + usage.get(
        "cache_creation_input_tokens", 0
    )
    return said_in(reply), n_prompt, n_evaluated


def said_in(reply: dict[str, Any]) -> str:
    """Return the words of an answer, and the reasoning, whatever the API."""
    if "choices" in reply:
        message = reply["choices"][0]["message"]
        return f"{message.get('reasoning_content') or ''}{message['content']}"
    parts = (
        reply["content"]
        if "content" in reply
        else [part for item in reply["output"] for part in item["content"]]
    )
    return "".join(part.get("thinking", "") + part.get("text", "") for part in parts)


async def alone(rig: Rig, messages: list[Any]) -> str:
    body = {"messages": messages, "max_tokens": 6, "temperature": 0, "cache_prompt": False}
    async with rig.client.post(rig.server.base_url + CHAT, json=body) as reply:
        return said_in(await reply.json())


@ONE_KIND
@pytest.mark.parametrize("route", [MESSAGES, RESPONSES])
async def test_text_before_an_image_is_restored_on_every_api(
    start_rig: StartRig, tmp_path: Path, kind: str, route: str
) -> None:
    projector = build_projector(tmp_path / "mmproj.gguf")
    async with start_rig(kind, n_slots=2, extra_args=("--mmproj", str(projector))) as rig:
        first = asking(1)
        _, n_first, n_evaluated = await ask(rig, first, route)
        assert n_evaluated == n_first > 3 * N_TEXT_WORDS
        later = [*first, answer(1), user(2, 10)]
        said, n_later, n_evaluated = await ask(rig, later, route)
        assert n_evaluated <= n_later - n_first + SLACK_TOKENS
        for seed in (7, 8):  # other conversations take both slots
            await ask(rig, [system(N_TEXT_WORDS, seed), user(seed, 10)], route)
        _, _, n_evaluated = await ask(rig, later, route)
        assert n_evaluated <= n_later - n_first + 2 * SLACK_TOKENS
        await rig.restart()
        said_again, _, n_evaluated = await ask(rig, later, route)
        assert n_evaluated <= n_later - n_first + 2 * SLACK_TOKENS
        assert said == said_again == await alone(rig, later)
        assert not rig.sample("drift_total")


async def test_text_before_a_picture_in_a_tools_result_is_restored(
    start_rig: StartRig, tmp_path: Path
) -> None:
    r, projector = responses_bodies, build_projector(tmp_path / "mmproj.gguf")
    told, asked = asking(1)
    seen = [r.HELLO, r.call("c", name="view_image"), r.output("c", as_parts(RESPONSES, asked))]
    first = r.asks(seen, instructions=told["content"])
    later = {**first, "input": [*seen, r.assistant(r.said("A cat.")), r.user(r.part("And now?"))]}
    async with start_rig("hybrid", extra_args=("--mmproj", str(projector))) as rig:
        n_first = (await rig.post(RESPONSES, first))["usage"]["input_tokens"]
        await rig.restart()
        before = await rig.evaluated()
        await rig.post(RESPONSES, later)
        assert await rig.evaluated() - before <= 2 * SLACK_TOKENS < n_first
        assert not rig.sample("drift_total")


@ONE_KIND
async def test_image_is_evaluated_once_and_the_text_before_it_is_restored(
    start_rig: StartRig, tmp_path: Path, kind: str
) -> None:
    projector = build_projector(tmp_path / "mmproj.gguf")
    async with start_rig(kind, extra_args=("--mmproj", str(projector))) as rig:
        first = asking(1)
        said, n_first, n_evaluated = await ask(rig, first)
        assert n_evaluated == n_first > 3 * N_TEXT_WORDS
        later = [*first, answer(1), user(2, 10)]
        said_later, n_later, n_evaluated = await ask(rig, later)
        assert n_evaluated <= n_later - n_first + SLACK_TOKENS
        said_of_other, _, n_evaluated = await ask(rig, asking(5))
        assert n_evaluated <= SLACK_TOKENS
        _, _, n_evaluated = await ask(rig, [first[0], user(3, 10)])
        assert n_evaluated <= 3 * SLACK_TOKENS
        await rig.restart()
        said_again, _, n_evaluated = await ask(rig, later)
        assert n_evaluated <= n_later - n_first + 2 * SLACK_TOKENS
        assert said_again == said_later
        expected = [await alone(rig, messages) for messages in (first, later, asking(5))]
        assert [said, said_later, said_of_other] == expected
        assert len(set(expected)) > 1


@ONE_KIND
async def test_client_that_leaves_an_image_finds_it_evaluated_and_no_save_fails(
    start_rig: StartRig, tmp_path: Path, kind: str
) -> None:
    projector = build_projector(tmp_path / "mmproj.gguf")
    async with start_rig(kind, extra_args=("--mmproj", str(projector))) as rig:
        body = {**as_asked(CHAT, asking(1)), "max_tokens": 4000, "stream": True}
        async with rig.client.post(rig.base_url + CHAT, json=body) as reply:
            await reply.content.readany()
        await rig.settled()
        assert not rig.n_faults()
        assert (await rig.health())["state"] == "caching"
        _, _, n_evaluated = await ask(rig, asking(1))
        assert n_evaluated <= SLACK_TOKENS


async def test_stopped_answer_to_an_image_is_no_failed_save(
    start_rig: StartRig, tmp_path: Path
) -> None:
    projector = build_projector(tmp_path / "mmproj.gguf")
    async with start_rig("hybrid", extra_args=("--mmproj", str(projector))) as rig:
        body = {"messages": asking(1), "max_tokens": 20_000, "ignore_eos": True, "stream": True}
        headers = {"X-Conversation-Id": "1"}
        async with rig.client.post(rig.base_url + CHAT, json=body, headers=headers) as reply:
            await reply.content.readany()
            async with rig.client.delete(rig.base_url + "/v1/stream?conv_id=1") as stopped:
                assert stopped.status == 204
            await reply.read()
        await until(lambda: rig.running.pool.processes[0].journal.n_recorded == 1)
        await rig.settled()
        assert (await rig.health())["reasons"] == []
        _, n_later, n_evaluated = await ask(rig, [*asking(1), answer(1), user(2, 10)])
        assert n_evaluated < n_later - 3 * N_TEXT_WORDS  # the text before the image is restored
        assert not rig.sample("drift_total")


async def test_image_behind_too_long_a_text_is_refused_as_without_the_proxy(
    start_rig: StartRig, tmp_path: Path
) -> None:
    arguments = ("--mmproj", str(build_projector(tmp_path / "mmproj.gguf")))
    async with start_rig("full", n_slots=1, n_ctx=1024, extra_args=arguments) as rig:
        short = [user(1, 200)]
        _, n_short, _ = await ask(rig, short)
        async with rig.client.post(rig.base_url + CHAT, json=as_asked(CHAT, asking(1))) as reply:
            assert (reply.status, b"exceeds" in await reply.read()) == (400, True)
        _, n_later, n_evaluated = await ask(rig, [*short, answer(1), user(2, 10)])
        assert n_evaluated <= n_later - n_short + SLACK_TOKENS
        assert not (rig.n_faults() or rig.sample("restores_total", result="done"))
