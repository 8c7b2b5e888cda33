"""The store as a tree: where checkpoints lie, what nodes sum up, and what people know them by."""

import pytest

from proxy.core.model import Checkpoint, CheckpointId, Family, Title
from proxy.core.rates import Rates
from proxy.core.tokens import Namespace
from proxy.explain.views import STORE, ListedNode, NodeId, Outline, parse_node_id
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


def outlined(
    names: dict[Namespace, str] | None = None,
    rates_by: dict[Namespace, Rates] | None = None,
    n_at_most: int = 100,
) -> dict[str, ListedNode]:
    outline = Outline()
    for each in CHECKPOINTS:
        outline.add(each)
    return {node.id: node for node in outline.nodes(names or {}, rates_by or {}, n_at_most)}


def test_parents_come_before_their_children_and_the_largest_first() -> None:
    mine, other = NodeId(NAMESPACE), NodeId(OTHER_NAMESPACE)
    levels = [
        *([STORE], [mine, other]),
        [NodeId(NAMESPACE, 7), NodeId(NAMESPACE, 0), NodeId(OTHER_NAMESPACE, 8)],
        [NodeId(NAMESPACE, 7, 70), NodeId(NAMESPACE, 0, 72), NodeId(OTHER_NAMESPACE, 8, 73)],
    ]
    expected = [str(node_id) for level in levels for node_id in level]
    assert list(outlined()) == [*expected, str(NodeId(NAMESPACE, 7, 71))]
    assert list(outlined(n_at_most=5)) == expected[:5]


def test_node_sums_up_what_lies_under_it() -> None:
    nodes = outlined()
    assert nodes[str(NodeId(NAMESPACE, 7))] == ListedNode(
        id=str(NodeId(NAMESPACE, 7)),
        parent=str(NodeId(NAMESPACE)),
        level="header",
        client="OpenCode 1.18",
        n_tokens=500,
        n_checkpoints=4,
        n_pinned=1,
        size_bytes=3050,
        last_used_at=4.0,
        n_restores=5,
    )
    session = nodes[str(NodeId(NAMESPACE, 7, 70))]
    assert (session.title, session.client) == ("Mend the login", "OpenCode 1.18")
    assert (session.n_tokens, session.n_checkpoints) == (603, 2)
    assert nodes[""].n_checkpoints == len(CHECKPOINTS)
    assert nodes[str(NodeId(NAMESPACE, 7, 71))].title == ""
    assert nodes[str(NodeId(NAMESPACE, 0))].client == ""


def test_node_tells_its_model_whether_that_is_served_and_what_it_would_cost() -> None:
    def told(node_id: NodeId, *served: Namespace) -> tuple[bool | None, str | None]:
        node = outlined({NAMESPACE: "coder"}, dict.fromkeys(served, Rates()))[str(node_id)]
        return node.is_served, node.model

    assert told(NodeId(NAMESPACE, 7), NAMESPACE) == (True, "coder")
    assert told(NodeId(OTHER_NAMESPACE), NAMESPACE) == (False, None)
    assert told(NodeId(NAMESPACE)) == (None, "coder")
    assert told(STORE, NAMESPACE) == (None, None)
    rates = Rates().after_evaluation(0, 1000, 10.0)
    nodes = outlined(rates_by={NAMESPACE: rates})
    header, session = nodes[str(NodeId(NAMESPACE, 7))], nodes[str(NodeId(NAMESPACE, 7, 70))]
    assert header.seconds == round(rates.evaluation_seconds(0, 500), 3)
    assert session.seconds == round(rates.evaluation_seconds(500, 603), 3)
    assert outlined(rates_by={NAMESPACE: Rates()})[str(NodeId(NAMESPACE, 7))].seconds is None


def test_ids_of_nodes_are_read_as_they_are_written() -> None:
    ids = [STORE, NodeId(NAMESPACE), NodeId(NAMESPACE, 0), NodeId(NAMESPACE, 7, 2**63 - 1)]
    assert [parse_node_id(str(node_id)) for node_id in ids] == ids
    assert [node_id.level for node_id in ids] == ["store", "namespace", "header", "session"]
    assert [node_id.parent for node_id in ids[1:]] == [STORE, ids[1], NodeId(NAMESPACE, 7)]
    for text in ("nonsense", "ab" * 16 + "/x", "ab" * 16 + "/1/2/3", "zz" * 16, "/"):
        with pytest.raises(ValueError):
            parse_node_id(text)
