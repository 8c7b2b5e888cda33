"""Known prompts: which of them a new prompt is compared with, and that they stay within their bounds."""

from array import array
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.model import Prompt
from proxy.core.tokens import Namespace, common_prefix_length, token_ids
from proxy.explain.causes import Cause
from proxy.explain.compare import Rendering
from proxy.explain.known import MAX_IDS, NO_LOSS, KnownPrompt, KnownPrompts, Loss, Match
from proxy.explain.sketch import Sketch, sketch_of

SPACE, OTHER = Namespace(b"n" * 16), Namespace(b"o" * 16)
RUN = range(1000)
EMPTY = sketch_of({})


def sketch(*messages: int, roles: str = "") -> Sketch:
    return Sketch(array("Q"), array("Q"), roles or "u" * len(messages), array("Q", messages))


def prompt(*tokens: int, namespace: Namespace = SPACE) -> Prompt:
    return Prompt(token_ids(tokens), namespace)


def kept(max_bytes: int = 1 << 20, max_prompts: int = 100) -> KnownPrompts:
    return KnownPrompts(max_bytes, max_prompts)


def known(name: str, new: Prompt, made_of: Sketch = EMPTY, ended_at: float = 1.0) -> KnownPrompt:
    rendering = Rendering({})
    rendering.sketch = made_of
    return KnownPrompt(new.namespace, new.tokens, rendering, ("process", 0), ended_at, (name,))


def add(
    prompts: KnownPrompts, name: str, new: Prompt, made_of: Sketch = EMPTY, ended_at: float = 1.0
) -> Match | None:
    """Look a prompt up and then keep it, as a request does; return what it was compared with."""
    asked = known(name, new, made_of, ended_at)
    nearest, compared = prompts.matches(asked, prompts.newest(), ended_at)
    prompts.add(asked, (nearest, compared))
    return compared


def nearest_of(prompts: KnownPrompts, new: Prompt) -> Match | None:
    return prompts.matches(known("new", new), prompts.newest(), 2.0)[0]


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=12),
    st.lists(st.integers(0, 2), min_size=1, max_size=12),
)
def test_nearest_prompt_is_the_newest_of_those_with_the_most_in_common(
    sequences: list[list[int]], asked: list[int]
) -> None:
    prompts = kept()
    for number, sequence in enumerate(sequences):
        prompts.add(known(str(number), prompt(*sequence)), ())
    wanted = prompt(*asked)
    common = [common_prefix_length(wanted.tokens, token_ids(s)) for s in sequences]
    found = nearest_of(prompts, wanted)
    if not any(common):
        assert found is None
    else:
        newest = max(i for i, n_common in enumerate(common) if n_common == max(common))
        assert found is not None and (found.n_common, found.known.ids[-1]) == (
            max(common),
            str(newest),
        )


def test_nearest_prompt_is_of_the_same_namespace() -> None:
    prompts = kept()
    add(prompts, "a", prompt(1, 2, 3))
    assert nearest_of(prompts, prompt(1, 2, 3)) is not None
    assert nearest_of(prompts, prompt(1, 2, 3, namespace=OTHER)) is None


def test_bounds_hold_and_the_oldest_prompts_are_forgotten() -> None:
    prompts = kept(max_bytes=100_000)
    for number in range(50):
        add(prompts, f"{number}", prompt(number, *range(2000)), sketch(number, number + 1))
        assert prompts.size_bytes <= 100_000
    assert 5 < len(prompts.newest()) < 20
    assert nearest_of(prompts, prompt(0, 1)) is None
    assert prompts.matches(known("new", prompt(7), sketch(0, 1)), [], 2.0) == (None, None)
    none, few = kept(max_prompts=0), kept(max_prompts=3)
    for number in range(5):
        add(few, str(number), prompt(number))
        add(none, str(number), prompt(number))
    assert (len(few.newest()), len(none.newest()), none.size_bytes) == (3, 0, 0)


def test_prompt_is_forgotten_after_a_newer_one_of_its_conversation() -> None:
    prompts, same = kept(max_prompts=2), sketch(5, 10, 11, roles="sua")
    add(prompts, "a", prompt(*RUN[:300]), same)
    add(prompts, "b", prompt(*RUN[:100], *RUN[500:700]), same)
    add(prompts, "c", prompt(*RUN[:100], *RUN[500:800]), sketch(6, 11, roles="su"))
    add(prompts, "d", prompt(7), sketch(7, 12, roles="su"))
    assert [each.ids[-1] for each in prompts.newest()] == ["d", "c"]


def test_prompt_that_a_later_one_goes_on_from_is_found_by_its_id_but_not_kept_beside_it() -> None:
    prompts, began = kept(), sketch(5, 10, roles="su")
    went_on = sketch(5, 10, 11, 12, roles="suau")
    add(prompts, "a", prompt(*RUN[:300], 7, 7), began)  # ends with what a template does not repeat
    add(prompts, "b", prompt(*RUN[:500]), went_on)
    assert len(prompts.newest()) == 1
    assert prompts.find("a") is prompts.find("b") is not None
    add(prompts, "edited", prompt(*RUN[:200], *RUN[300:]), went_on)
    add(prompts, "other", prompt(*RUN[:480], *RUN[500:]), sketch(5, 20, roles="su"))
    assert len(prompts.newest()) == 3
    for number in range(MAX_IDS):
        add(prompts, str(number), prompt(*RUN[:500]), went_on)
    assert (
        len(prompts.newest()) == 3 and prompts.find("a") is None and prompts.find("0") is not None
    )


def test_text_without_messages_is_replaced_by_one_that_begins_with_all_of_it() -> None:
    prompts = kept()
    for n_tokens in (300, 400, 500):
        add(prompts, f"{n_tokens}", prompt(*RUN[:n_tokens]))
    assert len(prompts.newest()) == 1
    add(prompts, "other", prompt(*RUN[:490], 7))
    assert len(prompts.newest()) == 2


def test_loss_is_told_as_far_as_it_reached() -> None:
    prompts = kept()
    add(prompts, "a", prompt(*RUN[:100]))
    prompts.note_loss(SPACE, token_ids([*RUN[:60], 900]), Cause.EVICTED)
    prompts.note_loss(SPACE, token_ids(RUN[:30]), Cause.RESTORE_REFUSED)
    prompts.note_loss(OTHER, token_ids(RUN), Cause.RESTORE_REFUSED)

    def loss(*tokens: int) -> Loss:
        found = nearest_of(prompts, prompt(*tokens))
        assert found is not None
        return found.known.loss

    assert loss(*RUN[:100]) == (Cause.EVICTED, 60)
    add(prompts, "b", prompt(*RUN[:100]))
    assert loss(*RUN[:100]) == NO_LOSS, "it was evaluated again"


def test_conversation_is_known_by_two_messages_or_a_long_answer_not_by_one_message() -> None:
    prompts = kept()
    add(prompts, "a", prompt(1, 2), sketch(10, 11, 12))
    add(prompts, "b", prompt(3, 4), sketch(20, 21, 22, roles="uAu"))

    def conversation(made_of: Sketch) -> str | None:
        found = prompts.matches(known("new", prompt(9), made_of), [], 2.0)[1]
        return found.known.ids[-1] if found else None

    assert conversation(sketch(99, 11, 12)) == "a"
    assert conversation(sketch(10, 99, 12)) is None
    assert conversation(sketch(10)) is None
    assert conversation(sketch(99, 21, 98, roles="uAu")) == "b"
    assert conversation(sketch(99, 21, 98, roles="uau")) is None
    add(prompts, "c", prompt(1, 2, 5), sketch(10, 11, 12, 13))
    assert conversation(sketch(10, 11)) == "c"


def test_conversation_that_others_continue_meanwhile_is_compared_as_it_was_when_planned() -> None:
    prompts = kept()
    add(prompts, "a", prompt(*RUN[:500]), sketch(10, 11, 12))
    then, planned_at = prompts.newest(), 2.0
    add(prompts, "b", prompt(*RUN[:600]), sketch(10, 11, 12, 13), ended_at=3.0)
    new = known("new", prompt(*RUN[:400], 7), sketch(98, 11, 12))
    _, found = prompts.matches(new, then, planned_at)
    assert found is not None and found.known.ids[-1] == "a"
    assert prompts.matches(new, [], planned_at) == (None, None)


def test_conversation_begun_again_under_the_new_header_is_compared_with_that() -> None:
    prompts = kept()
    add(prompts, "old", prompt(1, *RUN), sketch(5, 10, 11, 12, roles="suAu"))
    add(prompts, "again", prompt(2, *RUN[:300]), sketch(6, 10, roles="su"), ended_at=2.0)
    found = add(prompts, "new", prompt(2, *RUN), sketch(6, 10, 11, 12, roles="suAu"), ended_at=3.0)
    assert found is not None and found.known.ids[-1] == "again" and found.is_same_conversation


def test_prompt_that_goes_on_in_its_slot_is_found_without_its_messages() -> None:
    prompts = kept()
    add(prompts, "a", prompt(*RUN[:300], 7, 7))
    longer = prompt(*RUN[:500])
    for n_reused in (300, 298):
        found = prompts.continued(known("b", longer), n_reused)
        assert found is not None and (found.known.ids[-1], found.n_common) == ("a", 300)
        assert found.is_same_conversation and found.replaces
    # Less was reused, it was another prompt, another tenant's, or in another slot.
    assert prompts.continued(known("b", longer), 200) is None
    assert prompts.continued(known("b", prompt(*RUN[1:500])), 300) is None
    assert prompts.continued(known("b", prompt(*RUN[:500], namespace=OTHER)), 300) is None
    elsewhere = replace(known("b", longer), slot=("process", 1))
    assert prompts.continued(elsewhere, 300) is None
    lost = known("lost", prompt(*RUN[:480], 9))
    prompts.add(replace(lost, slot=("process", 1)), ())
    assert prompts.continued(known("b", longer), 300) is None, "180 more tokens were known"


def test_conversation_that_went_on_unread_is_known_by_its_messages_once_they_are_asked_for() -> (
    None
):
    prompts = kept()
    for n_messages in range(2, 5):
        messages = [{"role": "user", "content": str(i)} for i in range(n_messages)]
        new = known("new", prompt(*RUN[: 100 * n_messages]))
        new = replace(new, rendering=Rendering({"messages": messages}), ids=(str(n_messages),))
        found = prompts.continued(new, 100 * n_messages - 100)
        assert (found is None) is (n_messages == 2)
        prompts.add(new, (found,))
    assert len(prompts.newest()) == 1
    asked = replace(known("asked", prompt(9)), rendering=Rendering({"messages": messages}))
    compared = prompts.matches(asked, prompts.newest(), 2.0)[1]
    assert compared is not None and compared.known.ids == ("2", "3", "4")
    assert compared.known.rendering.fields == {}, "only digests are kept from now on"
