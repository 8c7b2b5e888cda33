"""Which slot a request goes on in so plainly that it is sent before its prompt is read."""

from dataclasses import replace

import pytest

from proxy.core.messages import Conversation
from proxy.core.model import Rule, RuleKind, SlotId
from proxy.core.residency import SHORT_MESSAGE_BYTES, slot_to_extend
from proxy.core.slots import TAINTED, Content, Empty, Known, Origin, Slot, SlotPhase
from proxy.core.tokens import Namespace, token_ids

OURS, THEIRS = Namespace(b"ours"), Namespace(b"theirs")
N_CTX = 10_000
ANY_PREFIX, POINTS = Rule(RuleKind.ANY_PREFIX), Rule(RuleKind.RESTORE_POINTS)
END_ONLY = Rule(RuleKind.END_ONLY)
TURN = ("system", "user")


def conversation(*roles: str, size_bytes: int = 100) -> Conversation:
    """Return a conversation in which the messages before differ only by their place."""
    digests = b"".join(index.to_bytes(8, "big") for index in range(len(roles) + 1))
    return Conversation(digests, roles, (size_bytes,) * len(roles))


HELD = Known(
    token_ids(range(1000)),
    OURS,
    restore_points=(500, 995),
    turn_start=990,
    conversation=conversation(*TURN).digests,
)


def found(
    asked: Conversation,
    *contents: Content,
    rule: Rule = POINTS,
    is_pinned: bool = True,
    leased: tuple[int, ...] = (),
    n_ctx: int = N_CTX,
    n_paying: int = 0,
) -> int | None:
    """Return the slot's id; under *end only* a file pays for *n_paying* new tokens."""
    slots = [
        Slot(SlotId(i), c, phase=SlotPhase.PREPARING if i in leased else SlotPhase.FREE)
        for i, c in enumerate(contents)
    ]

    def pays(n_saved: int, n_tokens: int) -> bool:
        return n_tokens - n_saved >= n_paying

    slot = slot_to_extend(asked, slots, rule, OURS, n_ctx, pays=pays, is_pinned=is_pinned)
    return None if slot is None else slot.id


STEP = conversation(*TURN, "assistant", "tool")


@pytest.mark.parametrize("rule", [ANY_PREFIX, POINTS])
def test_step_of_a_tool_loop_goes_on_in_its_slot(rule: Rule) -> None:
    assert found(STEP, Empty(), HELD, rule=rule) == 1


@pytest.mark.parametrize(
    "roles",
    [
        (),
        ("user",),
        ("assistant",),
        ("assistant", "tool", "assistant", "tool"),
        ("assistant", "tool", "assistant"),
        ("assistant", "system"),
    ],
)
def test_only_one_answer_and_what_follows_it_is_an_extension(roles: tuple[str, ...]) -> None:
    assert found(conversation(*TURN, *roles), HELD) is None


def test_other_messages_or_settings_are_planned() -> None:
    assert found(replace(STEP, digests=b"settings" + STEP.digests[8:]), HELD) is None
    assert (
        found(replace(STEP, digests=STEP.digests[:8] + b"earlier." + STEP.digests[16:]), HELD)
        is None
    )


def test_where_nothing_can_be_restored_every_request_is_planned() -> None:
    assert found(STEP, HELD, rule=Rule(RuleKind.NOTHING)) is None


def test_under_end_only_what_gets_no_file_goes_on_in_its_slot() -> None:
    """The tool's result has 100 bytes, 25 tokens."""
    saved = replace(HELD, n_saved=900)
    assert found(STEP, saved, rule=END_ONLY, n_paying=126) == 0
    assert found(STEP, saved, rule=END_ONLY, n_paying=125) is None
    assert found(STEP, HELD, rule=END_ONLY, n_paying=2000) is None  # its first file always pays


def test_under_end_only_turn_start_that_only_a_file_has_is_restored() -> None:
    """Templates that drop old reasoning go back to it, and a file may reach further than the slot."""
    turn = conversation(*TURN, "assistant", "user")
    near, far = (replace(HELD, restore_points=(n,), n_saved=995) for n in (985, 500))
    assert [found(turn, each, rule=END_ONLY, n_paying=500) for each in (near, far)] == [0, None]
    before = replace(far, n_saved=510)
    assert found(turn, before, rule=END_ONLY, n_paying=900) == 0
    assert found(STEP, far, rule=END_ONLY, n_paying=500) is None


def test_slot_that_may_not_be_reused_is_not_extended() -> None:
    assert found(STEP, HELD, leased=(0,)) is None
    assert found(STEP, replace(HELD, tenant=THEIRS)) is None
    cut = replace(HELD, origin=Origin(n_restored=900))
    assert found(STEP, cut, rule=ANY_PREFIX) is None and found(STEP, cut) == 0


def test_prompt_that_might_not_fit_is_planned() -> None:
    long = conversation(*TURN, "assistant", "tool", size_bytes=5000)
    assert found(long, HELD) is None and found(long, HELD, n_ctx=20_000) == 0


def test_another_slot_with_as_much_is_for_the_plan_to_weigh() -> None:
    branch = replace(HELD, tokens=token_ids(range(1200)), conversation=b"")
    assert found(STEP, HELD, branch) is None
    shorter = replace(HELD, tokens=HELD.tokens[:900], conversation=b"")
    assert found(STEP, HELD, shorter) == 0


def test_llama_server_may_choose_a_slot_whose_content_is_unknown() -> None:
    assert found(STEP, HELD, TAINTED) == 0
    assert found(STEP, HELD, TAINTED, is_pinned=False) is None


def test_long_message_of_the_user_is_planned_where_a_stop_gains_something() -> None:
    short = conversation(*TURN, "assistant", "user", size_bytes=SHORT_MESSAGE_BYTES)
    long = conversation(*TURN, "assistant", "user", size_bytes=SHORT_MESSAGE_BYTES + 1)
    assert [found(each, HELD, n_ctx=20_000) for each in (short, long)] == [0, None]
    assert found(long, HELD, rule=ANY_PREFIX, n_ctx=20_000) == 0


def test_turn_start_that_only_a_file_has_is_restored() -> None:
    short = conversation(*TURN, "assistant", "user")
    lost = replace(HELD, restore_points=(995,), saved_points=(500, 985))
    assert found(short, lost) is None
    assert found(short, replace(lost, saved_points=())) == 0
