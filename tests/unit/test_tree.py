"""The store as a tree: where checkpoints lie, what nodes sum up, and what people know them by."""

from proxy.core.model import Checkpoint, CheckpointId, Family, Title
from proxy.core.rates import Rates
from proxy.core.tokens import Namespace
from proxy.explain.views import ListedNode, Outline, list_checkpoint
from tests.unit.builders import NAMESPACE, OTHER_NAMESPACE, checkpoint


def stored(number: int, header_id: int, session_id: int, **changes: object) -> Checkpoint:
    defaults = {"id": CheckpointId(number), "last_used_at": float(number), "header": 500}
    return checkpoint(600 + number, **{**defaults, **changes}, family=Family(header_id, session_id))


MINE = Title("Mend the login", "OpenCode 1.18")
CHECKPOINTS = [
    stored(1, 7, 0, n_restores=4),
    stored(2, 7, 70, created_at=5.0),
    stored(3, 7, 70, is_pinned=True, n_restores=1, title=MINE),
    stored(4, 7, 71, size_bytes=50, title=Title("", "OpenCode 1.18")),
    stored(5, 0, 72, header=0),
    stored(6, 8, 73, namespace=OTHER_NAMESPACE),
]


def node(namespace: Namespace, *numbers: int) -> str:
    return "/".join([namespace.hex(), *(f"{number:016x}" for number in numbers)])


def outlined(
    names: dict[Namespace, str] | None = None,
    rates_by: dict[Namespace, Rates] | None = None,
    n_at_most: int = 100,
) -> dict[str, ListedNode]:
    outline = Outline()
    for each in CHECKPOINTS:
        outline.add(list_checkpoint(each, names or {}))
    return {node.id: node for node in outline.nodes(rates_by or {}, n_at_most)}


def test_parents_come_before_their_children_and_the_largest_first() -> None:
    mine, other = node(NAMESPACE), node(OTHER_NAMESPACE)
    levels = [
        *([""], [mine, other]),
        [node(NAMESPACE, 7), node(NAMESPACE, 0), node(OTHER_NAMESPACE, 8)],
        [node(NAMESPACE, 7, 70), node(NAMESPACE, 0, 72), node(OTHER_NAMESPACE, 8, 73)],
    ]
    expected = [node_id for level in levels for node_id in level]
    assert list(outlined()) == [*expected, node(NAMESPACE, 7, 71)]
    assert list(outlined(n_at_most=5)) == expected[:5]


def test_node_sums_up_what_lies_under_it() -> None:
    nodes = outlined()
    assert nodes[node(NAMESPACE, 7)] == ListedNode(
        id=node(NAMESPACE, 7),
        parent=node(NAMESPACE),
        level="header",
        client="OpenCode 1.18",
        n_tokens=500,
        n_checkpoints=4,
        n_pinned=1,
        size_bytes=3050,
        last_used_at=4.0,
        n_restores=5,
    )
    session = nodes[node(NAMESPACE, 7, 70)]
    assert (session.title, session.client) == ("Mend the login", "OpenCode 1.18")
    assert (session.n_tokens, session.n_checkpoints) == (603, 2)
    assert nodes[""].n_checkpoints == len(CHECKPOINTS)
    assert nodes[node(NAMESPACE, 7, 71)].title == ""
    assert nodes[node(NAMESPACE, 0)].client == ""


def test_node_tells_its_model_and_what_it_would_cost() -> None:
    named = outlined({NAMESPACE: "coder"})
    assert named[node(NAMESPACE)].model == named[node(NAMESPACE, 7)].model == "coder"
    assert named[node(OTHER_NAMESPACE)].model is named[""].model is None
    rates = Rates().after_evaluation(0, 1000, 10.0)
    nodes = outlined(rates_by={NAMESPACE: rates})
    header, session = nodes[node(NAMESPACE, 7)], nodes[node(NAMESPACE, 7, 70)]
    assert header.seconds == round(rates.evaluation_seconds(0, 500), 3)
    assert session.seconds == round(rates.evaluation_seconds(500, 603), 3)
    assert outlined(rates_by={NAMESPACE: Rates()})[node(NAMESPACE, 7)].seconds is None
