"""Conversations with an image, on a real llama-server with a tiny image encoder."""

from pathlib import Path
from typing import Any

from tests.lab.conversation import answer, system, user
from tests.lab.media import build_projector, image_part
from tests.lab.rig import Rig
from tests.live.conftest import ONE_KIND, StartRig

SLACK_TOKENS = 64
N_TEXT_WORDS = 600


def asking(image: int) -> list[Any]:
    parts = [{"type": "text", "text": "Look at this:"}, image_part(image)]
    content = [*parts, {"type": "text", "text": "What is it?"}]
    return [system(N_TEXT_WORDS), {"role": "user", "content": content}]


async def ask(rig: Rig, messages: list[Any]) -> tuple[str, int, int]:
    """Return what the answer says, how long the prompt was, and how much of it was evaluated."""
    before = await rig.evaluated()
    reply = await rig.chat(messages, max_tokens=6)
    n_evaluated = await rig.evaluated() - before
    said = reply["choices"][0]["message"]
    return f"{said}", reply["usage"]["prompt_tokens"], n_evaluated


async def alone(rig: Rig, messages: list[Any]) -> str:
    body = {"messages": messages, "max_tokens": 6, "temperature": 0, "cache_prompt": False}
    async with rig.client.post(rig.server.base_url + "/v1/chat/completions", json=body) as reply:
        return f"{(await reply.json())['choices'][0]['message']}"


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
