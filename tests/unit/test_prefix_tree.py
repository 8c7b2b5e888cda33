"""The tree of prefixes, against a list of sequences; and known prompts within their bound."""

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.explaining.known_prompts import KnownPrompts
from proxy.core.explaining.prefix_tree import NODE_BYTES, PrefixTree
from proxy.core.explaining.sketch import EMPTY, Sketch, digests
from proxy.core.prefix import Namespace, common_prefix_length, token_ids

SPACE, OTHER = Namespace(b"n" * 16), Namespace(b"o" * 16)
SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=12)


@given(SEQUENCES, st.lists(st.integers(0, 2), max_size=12), st.data())
def test_tree_knows_what_a_list_of_all_sequences_knows(
    sequences: list[list[int]], asked: list[int], data: st.DataObject
) -> None:
    tree = PrefixTree(token_ids(()))
    kept = {}
    for number, sequence in enumerate(map(token_ids, sequences)):
        kept[str(number)] = (tree.add(sequence, str(number)), sequence)
    gone = data.draw(st.sets(st.sampled_from(sorted(kept)))) if kept else set()
    for owner in gone:
        tree.remove(kept.pop(owner)[0])
    wanted = token_ids(asked)
    common = {o: common_prefix_length(wanted, sequence) for o, (_, sequence) in kept.items()}
    walk = tree.walk(wanted)
    assert walk.n_common == max(common.values(), default=0)
    for end, sequence in kept.values():
        for begin in range(len(sequence)):
            assert tree.part(end, len(sequence), begin, begin + 3) == sequence[begin : begin + 3]
    assert all(tree.sequence(end) == sequence for end, sequence in kept.values())
    if walk.n_common and walk.node.latest not in gone:
        nearest = max((o for o in common if common[o] == walk.n_common), key=int)
        assert walk.node.latest == nearest
    assert (tree.size_bytes == 0) is not any(sequence for _, sequence in kept.values())


def test_text_is_kept_once_where_it_is_shared() -> None:
    tree = PrefixTree("")
    ends = [tree.add("a" * 5000 + end, end) for end in ("one", "two", "one more")]
    assert tree.size_bytes < 5000 + 10 * NODE_BYTES
    assert tree.sequence(ends[2]) == "a" * 5000 + "one more"


def test_loss_is_told_as_far_as_it_reached() -> None:
    tree = PrefixTree(token_ids(()))
    tree.add(token_ids(range(100)), "a")
    tree.note_loss(token_ids([*range(60), 900]), "evicted")
    tree.add(token_ids([*range(30), 500]), "b")
    assert tree.loss(tree.walk(token_ids(range(100)))) == ("evicted", 60)
    assert tree.loss(tree.walk(token_ids(range(20)))) == ("evicted", 20)
    assert tree.loss(tree.walk(token_ids([*range(30), 500]))) == ("evicted", 30)
    assert tree.loss(tree.walk(token_ids([7]))) == (None, 0)


def sketch(*messages: int, roles: str = "") -> Sketch:
    return Sketch(digests([]), digests([]), roles or "u" * len(messages), digests(list(messages)))


def known(max_bytes: int = 1 << 20, max_prompts: int = 100) -> KnownPrompts:
    return KnownPrompts(max_bytes, max_prompts, keeps_text=True)


def add(prompts: KnownPrompts, name: str, tokens: list[int], made_of: Sketch = EMPTY) -> None:
    prompts.add(name, SPACE, token_ids(tokens), name * 100, made_of, "process", 1.0)


def test_known_prompts_stay_within_their_bounds_and_forget_the_oldest() -> None:
    prompts = known(max_bytes=100_000)
    for number in range(50):
        add(prompts, f"{number:03}", [number, *range(2000)], sketch(number, number + 1))
        assert prompts.size_bytes <= 100_000
    assert 5 < len(prompts) < 20
    assert prompts.look_up(SPACE, token_ids([0, 1])).nearest is None
    assert prompts.of_conversation(SPACE, sketch(0, 1), None) is None
    few = known(max_prompts=3)
    for number in range(5):
        add(few, str(number), [number])
    assert len(few) == 3


def test_nearest_prompt_is_the_longest_in_common_and_of_the_same_namespace() -> None:
    prompts = known()
    add(prompts, "a", [1, 2, 3, 4])
    add(prompts, "b", [1, 2, 9])
    found = prompts.look_up(SPACE, token_ids([1, 2, 3, 7]))
    assert found.nearest is not None
    assert (found.n_common, found.nearest.id) == (3, "a")
    assert prompts.tokens(found.nearest) == token_ids([1, 2, 3, 4])
    assert prompts.text(found.nearest) == "a" * 100
    assert prompts.look_up(OTHER, token_ids([1, 2])).nearest is None


def test_conversation_is_known_by_two_messages_or_a_long_answer_not_by_one_message() -> None:
    prompts = known()
    add(prompts, "a", [1, 2], sketch(10, 11, 12))
    add(prompts, "b", [3, 4], sketch(20, 21, 22, roles="uAu"))

    def conversation(made_of: Sketch) -> str | None:
        found = prompts.of_conversation(SPACE, made_of, None)
        return found.id if found else None

    assert conversation(sketch(99, 11, 12)) == "a"
    assert conversation(sketch(10, 99, 12)) is None
    assert conversation(sketch(10)) is None
    assert conversation(sketch(99, 21, 98, roles="uAu")) == "b"
    assert conversation(sketch(99, 21, 98, roles="uau")) is None
    add(prompts, "c", [1, 2, 5], sketch(10, 11, 12, 13))
    nearest = prompts.look_up(SPACE, token_ids([1, 2])).nearest
    assert conversation(sketch(10, 11)) == "c" and nearest is not None
