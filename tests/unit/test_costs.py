"""What each part of a prompt costs, and which parts the compared prompt had not."""

from typing import Any

import pytest

from proxy.core.tokens import Namespace, token_ids
from proxy.explain.causes import Cause, PromptPart
from proxy.explain.compare import Rendering
from proxy.explain.known import KnownPrompt
from proxy.explain.report import Journal
from proxy.explain.sketch import Cost, costs_of, sketch_of
from proxy.explain.views import Explanation, Nearest, RequestRecord

HEADER = {"role": "system", "content": "s" * 1000}
FIRST = {"role": "user", "content": "u" * 500}


def tool(name: str, text: str = "") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": text}}


def fields(tools: list[Any], *messages: Any) -> dict[str, Any]:
    return {"tools": tools, "messages": [HEADER, FIRST, *messages]}


ONE = fields([tool("one"), tool("two", "t" * 2000)])
GONE_ON = fields(ONE["tools"], {"role": "assistant", "content": "a" * 400})


def costs(new: dict[str, Any], old: dict[str, Any] | None, n_tokens: int = 1000) -> list[Cost]:
    return costs_of(sketch_of(new), 1000, n_tokens, sketch_of(old or {}), 0)


def changed(found: list[Cost]) -> list[str]:
    return [cost.name or str(cost.message) for cost in found if cost.is_changed]


def test_parts_are_told_in_proportion_and_by_name() -> None:
    one, two, system, user = costs(ONE, None)
    assert sum(cost.n_tokens for cost in (one, two, system, user)) in range(998, 1003)
    assert (two.name, two.part, two.message) == ("two", PromptPart.TOOLS, None)
    assert two.n_tokens > system.n_tokens > user.n_tokens > one.n_tokens
    assert (system.part, system.message, user.message) == (PromptPart.SYSTEM, 0, 1)
    assert changed([one, two, system, user]) == ["one", "two", "0", "1"]


def test_parts_that_differ_from_the_compared_prompt_are_marked() -> None:
    assert changed(costs(ONE, ONE)) == []
    assert changed(costs(GONE_ON, ONE)) == ["2"]
    other = fields([tool("one"), tool("two", "another")])
    assert changed(costs(other, ONE)) == ["two"]
    assert changed(costs(fields(ONE["tools"][::-1]), ONE)) == ["two", "one"]


def explained(journal: Journal, request_id: str, n_prompt: int, nearest: Nearest | None) -> Any:
    facts: dict[str, Any] = {"at": 1.0, "path": "", "outcome": "hit", "seconds": 1.0}
    record = RequestRecord(id=request_id, cause=Cause.HIT, n_prompt=n_prompt, **facts)
    found = Explanation(request=record, says="", cure="", nearest=nearest)
    return journal.with_costs(found).costs


def test_request_that_a_later_one_goes_on_from_has_its_own_parts_only() -> None:
    journal, tokens = Journal(), token_ids(range(1200))
    rendering = Rendering(GONE_ON, "text")
    known = KnownPrompt(Namespace(b""), tokens, rendering, ("", 0), 0.0, ("a", "b"))
    journal.prompts.add(known, ())
    nearest = Nearest(n_common=1080, id="a", n_tokens=1080)
    assert [cost.message for cost in explained(journal, "a", 1080, None)] == [None, None, 0, 1]
    later = explained(journal, "b", 1200, nearest)
    assert changed(later) == ["2"] and later[1].name == "two"
    assert explained(journal, "unknown", 5, None) == []


@pytest.mark.parametrize(
    "medium",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}},
        {"type": "input_audio", "input_audio": {"data": "A" * 100_000, "format": "wav"}},
    ],
)
def test_image_is_not_taken_for_text(medium: dict[str, Any]) -> None:
    """Only the tokens before an image are known, and the request's own count."""
    journal = Journal()
    looking = {"role": "user", "content": [{"type": "text", "text": "Look."}, medium]}
    rendering = Rendering(fields(ONE["tools"], looking), "text")
    journal.prompts.add(
        KnownPrompt(Namespace(b""), token_ids(range(900)), rendering, ("", 0), 0.0, ("a",)), ()
    )
    *_, system, user, asked = explained(journal, "a", 1000, None)
    assert sum(cost.n_tokens for cost in explained(journal, "a", 1000, None)) in range(997, 1004)
    assert system.n_tokens > user.n_tokens > asked.n_tokens


def test_names_of_tools_are_not_kept_where_no_text_is() -> None:
    assert Rendering(ONE, "text").sketch.tool_names == ("one", "two")
    assert Rendering(ONE).sketch.tool_names == ()
