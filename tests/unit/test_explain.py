"""Why no more was reused: each cause is told when it is so, and not when it is not."""

from dataclasses import replace
from typing import Any

import pytest

from proxy.core.model import NO_RULE, Cuts, Rule, RuleKind, SlotId
from proxy.core.plan import Plan, Start, Why
from proxy.core.tokens import Namespace, common_prefix_length, token_ids
from proxy.explain.causes import Cause, PromptPart
from proxy.explain.compare import Divergence, Rendering
from proxy.explain.judgement import Account, Judgement, Past, judge, judge_prompt
from proxy.explain.known import KnownPrompt, Match

POINTS, ANY = Rule(RuleKind.RESTORE_POINTS), Rule(RuleKind.ANY_PREFIX)


def served(n_reused: int, n_shared: int, why: Why = Why.NOTHING_FOUND, **changes: Any) -> Account:
    """Return how a prompt of 1,000 tokens was served that reused what was expected."""
    failure = changes.pop("failure", None)
    plan = Plan(Start(SlotId(0), n_reused, n_reused), why=why, n_shared=n_shared, **changes)
    return Account(plan, 1000, n_reused=n_reused, failure=failure)


def live(n_reused: int) -> Account:
    """Return how it was served by a slot that had 900 of its tokens, as far as the proxy knew."""
    return Account(Plan(Start(SlotId(0), 900, 900), n_shared=900), 1000, n_reused=n_reused)


SERVED = served(900, 900, Why.LIVE_LONGEST)
KNOWN = Past(900, 900)
NOTHING, UNUSED = served(0, 0), served(0, 900)
Change = tuple[Cause, Divergence]
DATE: Change = Cause.DATE, Divergence(PromptPart.SYSTEM, 0)
NEW = Cause.FIRST_SIGHT, Divergence(PromptPart.USER, 1)


def cause(
    account: Account, past: Past = KNOWN, change: Change | None = None, rule: Rule = POINTS
) -> Cause:
    return judge(account, rule, past, change).cause


def test_what_was_reused_as_far_as_it_was_known_is_a_hit_and_what_is_new_is_first_sight() -> None:
    assert cause(SERVED) is Cause.HIT
    assert cause(served(850, 900)) is Cause.HIT
    assert cause(NOTHING, Past()) is Cause.FIRST_SIGHT
    assert cause(SERVED, KNOWN, NEW) is Cause.FIRST_SIGHT
    assert cause(SERVED, KNOWN, DATE) is Cause.HIT  # all of it was reused, whatever differs


def test_few_reused_tokens_are_first_sight_unless_they_are_all_of_the_conversation() -> None:
    few, more = (served(n, n, Why.LIVE_LONGEST) for n in (64, 65))
    assert (few.outcome, cause(few, Past(64, 64))) == ("miss", Cause.FIRST_SIGHT)
    assert (more.outcome, cause(more, Past(65, 65))) == ("hit", Cause.HIT)
    assert cause(few, Past(64, 64, is_same=True)) is Cause.HIT
    new = known_prompt("So.", "One.", "Two.", "Sing of the sea. " * 20)
    for is_same, expected in ((False, Cause.FIRST_SIGHT), (True, Cause.HIT)):
        match = Match(known_prompt("So.", "One."), 34, is_same_conversation=is_same)
        plan = Plan(Start(SlotId(0), 34, 34), why=Why.LIVE_LONGEST, n_shared=34)
        account = Account(plan, len(new.tokens), n_reused=34)
        found = judge_prompt(new, (match, match), account, POINTS, {"process": ()})
        assert (found.cause, found.is_same_conversation) == (expected, is_same)


@pytest.mark.parametrize(
    ("account", "rule", "past", "expected"),
    [
        (NOTHING, POINTS, replace(KNOWN, loss=(Cause.EVICTED, 900)), Cause.EVICTED),
        (
            *(NOTHING, POINTS, replace(KNOWN, loss=(Cause.RESTORE_REFUSED, 800))),
            Cause.RESTORE_REFUSED,
        ),
        (NOTHING, POINTS, KNOWN, Cause.NOT_KEPT),
        (NOTHING, NO_RULE, KNOWN, Cause.NOTHING_RESTORABLE),
        (UNUSED, POINTS, KNOWN, Cause.NO_STATE_THERE),
        (served(0, 900, n_in_use=900), POINTS, KNOWN, Cause.IN_USE),
        (served(0, 900, Why.NOTHING_WORTH_IT), POINTS, KNOWN, Cause.CHEAPER),
        (UNUSED, ANY, KNOWN, Cause.UNKNOWN),
        (live(0), ANY, KNOWN, Cause.SLOT_HELD_LESS),
        (live(0), POINTS, KNOWN, Cause.SLOT_HELD_LESS),
        (UNUSED, NO_RULE, KNOWN, Cause.NOTHING_RESTORABLE),
    ],
)
def test_state_that_is_gone_or_not_used_is_named(
    account: Account, rule: Rule, past: Past, expected: Cause
) -> None:
    assert judge(account, rule, past, None) == Judgement(expected, 900)
    assert cause(served(900, 900), past, rule=rule) is Cause.HIT


def test_slot_that_held_less_is_not_blamed_where_a_context_checkpoint_may_have_gone() -> None:
    assert cause(live(15), rule=ANY) is Cause.SLOT_HELD_LESS
    assert cause(live(300)) is Cause.NO_STATE_THERE


def test_loss_of_less_than_what_is_still_there_explains_nothing() -> None:
    shorter = replace(KNOWN, loss=(Cause.EVICTED, 300))
    assert cause(served(300, 300), shorter) is Cause.NOT_KEPT


def test_change_of_the_client_explains_what_would_have_been_reused_without_it() -> None:
    reused = served(100, 100)
    found = judge(reused, POINTS, Past(100, 900), DATE)
    assert found == Judgement(Cause.DATE, 800, PromptPart.SYSTEM, 0)
    assert cause(reused, Past(100, 120), DATE) is Cause.HIT
    # A memory that cannot go back there has the state, and still the change is to blame.
    assert judge(UNUSED, POINTS, KNOWN, DATE).n_missed == 900
    # Nobody could have gone on from what is gone, change or not.
    evicted = replace(KNOWN, loss=(Cause.EVICTED, 900))
    assert cause(NOTHING, evicted, DATE) is Cause.EVICTED


@pytest.mark.parametrize(
    "failure", [Cause.RESTORE_REFUSED, Cause.RESTORE_NOT_REUSED, Cause.TOKENIZED_OTHERWISE]
)
def test_what_failed_comes_first(failure: Cause) -> None:
    failed = served(0, 900, failure=failure)
    assert cause(failed, replace(KNOWN, loss=(Cause.EVICTED, 900)), DATE) is failure


def judged(system: str, *messages: str, n_in_state: int = 0) -> Judgement:
    """Return the judgement on a prompt, of a token for each character, after one under another header.

    That one is of the same conversation, unless a state has more of the prompt.
    """
    after = [
        known_prompt(*each) for each in (("Sing of the sea. " * 60, *messages), (system, *messages))
    ]
    old, new = after
    n_common = common_prefix_length(old.tokens, new.tokens)
    match = Match(old, n_common, is_same_conversation=not n_in_state)
    n_reused = max(n_common, n_in_state)
    plan = Plan(Start(SlotId(0), n_reused, n_reused), why=Why.LIVE_LONGEST, n_shared=n_reused)
    account = Account(plan, len(new.tokens), n_reused=n_reused)
    return judge_prompt(new, (match, match), account, POINTS, {"process": ()})


def known_prompt(system: str, *messages: str) -> KnownPrompt:
    roles = ("system", "user", "assistant", "user")
    asked = [{"role": r, "content": c} for r, c in zip(roles, (system, *messages), strict=False)]
    text = "<|begin|>" + "".join(f"<|{m['role']}|>{m['content']}" for m in asked)
    rendering, tokens = Rendering({"messages": asked}, text), token_ids(list(text.encode()))
    return KnownPrompt(Namespace(b"n" * 16), tokens, rendering, ("process", 0), 1.0, ("id",))


def test_header_that_nobody_has_sent_before_is_not_missed() -> None:
    other, question, answer = "Check what it returns. " * 50, "Look at it. " * 20, "I see. " * 80
    assert judged(other, question).cause is Cause.FIRST_SIGHT
    moved = judged(other, question, answer, "Go on.")
    assert moved.cause is Cause.SYSTEM_TEXT
    assert len(answer) < moved.n_missed


def test_new_question_under_a_header_with_another_date_is_not_missed() -> None:
    headers = [f"It is 2026-11-{day}. " + "Check what it returns. " * 50 for day in (21, 22)]
    questions = "Look at it. " * 90, "Sing of the sea. " * 90
    old, new = (known_prompt(*each) for each in zip(headers, questions, strict=True))
    n_common = common_prefix_length(old.tokens, new.tokens)
    n_header = len("<|begin|><|system|>" + headers[1])
    account = Account(Plan(Start(SlotId(0)), cuts=Cuts(n_header)), len(new.tokens), n_reused=0)
    match = Match(old, n_common)
    found = judge_prompt(new, (match, match), account, POINTS, {"process": ()})
    assert (found.cause, found.n_missed) == (Cause.DATE, n_header)


def test_state_with_more_of_a_prompt_than_another_conversation_leaves_nothing_to_compare() -> None:
    """After a restart of the proxy only the state is left of a conversation."""
    system = "Sing of the sea. " * 55 + "Work in another folder. "
    messages = "Look at it. " * 20, "I see. " * 80, "Go on."
    assert judged(system, *messages).cause is Cause.SYSTEM_TEXT
    found = judged(system, *messages, n_in_state=len(system) + len(messages[0]))
    assert (found.cause, found.n_missed) == (Cause.HIT, 0)
