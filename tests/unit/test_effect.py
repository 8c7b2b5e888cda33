"""What stabilizers are worth, told of the requests of real clients in our own words."""

import pytest

from proxy.stabilize.effect import Beginnings, Effect, Piece
from proxy.stabilize.memory import Memory
from proxy.stabilize.model import Facts, Form, Json
from proxy.stabilize.names import SAFE, Name
from proxy.stabilize.stabilizing import stabilize
from tests.lab.clients import claude_code as cc
from tests.lab.clients import claude_code_mutations as claude_code
from tests.lab.clients import opencode_mutations as opencode
from tests.lab.clients.mutation import Mutation


def effects(
    mutation: Mutation, switches: frozenset[Name], *, tenants: tuple[str, ...] = ("", "", "")
) -> list[tuple[Name, int] | None]:
    effect, memory = Effect(), Memory()
    told = []
    for body, tenant in zip(mutation.requests, tenants, strict=False):
        facts = Facts(tenant=tenant)
        result = stabilize(mutation.form, body, memory, switches, facts)
        memory.learn(result.lessons)
        told.append(effect.of(mutation.form, body, result, tenant))
    return told


@pytest.mark.parametrize(
    ("mutation", "name", "least_share", "most_share"),
    [
        # The tools come first here, and the billing line behind them.
        (claude_code.m1_billing_line_of_another_session(), Name.DROP_BILLING_HEADER, 0.3, 0.4),
        (claude_code.m2_nonce_in_every_request(), Name.DROP_BILLING_HEADER, 0.3, 0.4),
        (claude_code.m4_environment_behind_the_prompt(), Name.HOIST_SYSTEM_MESSAGE, 0.15, 0.2),
        (claude_code.m9_tool_loaded_in_mid_conversation(), Name.KEEP_TOOL_ORDER, 0.3, 0.5),
        (opencode.o1_date_at_midnight(), Name.STICKY_DATE, 0.3, 0.5),
        (opencode.o4_plan_to_build(), Name.STICKY_TOOL_TEXT, 0.5, 0.7),
        (opencode.o5_reminder_moves_to_the_newest_message(), Name.STICKY_REMINDERS, 0.2, 0.4),
    ],
    ids=lambda value: value.name if isinstance(value, Mutation) else None,
)
def test_what_a_rewrite_keeps_is_told_of_the_stabilizer_that_was_needed(
    mutation: Mutation, name: Name, least_share: float, most_share: float
) -> None:
    *before, last = effects(mutation, SAFE | {name})
    assert not any(before)
    assert last is not None and last[0] is name
    n_characters = len(str(mutation.requests[-2]))
    assert least_share < last[1] / n_characters < most_share


@pytest.mark.parametrize(
    "mutation",
    [
        claude_code.tool_loop(),  # only marks for another cache move
        claude_code.m5_another_git_status(),
        opencode.tool_loop(),
        opencode.o2_another_folder(),
        opencode.o11_fresh_session(),
    ],
    ids=lambda mutation: mutation.name,
)
def test_nothing_is_told_where_no_rewrite_was_needed(mutation: Mutation) -> None:
    later = effects(mutation, SAFE)[1:]
    assert [
        effect for effect in later if effect and effect[0] is not Name.HOIST_SYSTEM_MESSAGE
    ] == []


def test_nothing_is_told_with_all_off_or_of_another_tenant() -> None:
    mutation = claude_code.m1_billing_line_of_another_session()
    assert not any(effects(mutation, frozenset()))
    assert not any(effects(mutation, SAFE, tenants=("one", "two")))


def test_mark_that_moves_and_a_text_that_becomes_a_list_make_no_difference() -> None:
    marked: Json = {"role": "user", "content": [{**cc.text("hi"), "cache_control": cc.EPHEMERAL}]}
    bodies: list[Json] = [
        {"messages": [marked]},
        {"messages": [cc.user("hi"), cc.answer(1), cc.user("go on")]},
    ]
    assert not any(effects(Mutation("", Form.ANTHROPIC, tuple(bodies)), SAFE))


def test_beginnings_are_forgotten_the_oldest_first() -> None:
    beginnings = Beginnings(max_beginnings=3)
    pieces = [Piece("messages[0]", text) for text in "abc"]
    assert beginnings.enter(b"", pieces) == 0
    assert beginnings.enter(b"", pieces) == 3
    assert beginnings.enter(b"", [Piece("messages[0]", "d")]) == 0
    assert beginnings.enter(b"", pieces) == 0
