"""The store as a tree: where checkpoints lie, what nodes sum up, and that one level is lazy."""

import pytest

from proxy.core.model import Checkpoint, CheckpointId, Family
from proxy.core.tokens import Namespace
from proxy.explain.views import (
    STORE,
    ListedNode,
    NodeId,
    children_of,
    node_of,
    parse_node_id,
    under,
)
from tests.unit.builders import NAMESPACE, OTHER_NAMESPACE, checkpoint


def stored(number: int, header_id: int, session_id: int, **changes: object) -> Checkpoint:
    defaults = {"id": CheckpointId(number), "last_used_at": float(number), "header": 500}
    return checkpoint(600 + number, **{**defaults, **changes}, family=Family(header_id, session_id))


CHECKPOINTS = [
    stored(1, 7, 0, n_restores=4),
    stored(2, 7, 70, created_at=5.0),
    stored(3, 7, 70, is_pinned=True, n_restores=1),
    stored(4, 7, 71, size_bytes=50),
    stored(5, 0, 72, header=0),
    stored(6, 8, 73, namespace=OTHER_NAMESPACE),
]


def listed(node_id: NodeId, *page: int) -> list[str | int]:
    children = children_of(node_id, under(node_id, CHECKPOINTS), {}, (), *page)
    return [child.id for child in children]


def shown(node_id: NodeId) -> list[NodeId | int]:
    return [parse_node_id(id) if isinstance(id, str) else id for id in listed(node_id)]


def sums(node_id: NodeId) -> ListedNode:
    return node_of(node_id, under(node_id, CHECKPOINTS), {}, ())


def test_each_level_lists_the_last_used_first_and_checkpoints_by_length() -> None:
    mine, header = NodeId(NAMESPACE), NodeId(NAMESPACE, 7)
    assert shown(STORE) == [NodeId(OTHER_NAMESPACE), mine]
    assert shown(mine) == [NodeId(NAMESPACE, 0), header]
    assert shown(header) == [NodeId(NAMESPACE, 7, 71), NodeId(NAMESPACE, 7, 70), 1]
    assert shown(NodeId(NAMESPACE, 7, 70)) == [2, 3]


def test_node_sums_up_what_lies_under_it() -> None:
    store, header = str(NodeId(NAMESPACE)), str(NodeId(NAMESPACE, 7))
    assert sums(NodeId(NAMESPACE, 7)) == ListedNode(
        header, store, "header", 500, 4, 3, 1, 3050, 0.0, 4.0, 5, None
    )
    session = NodeId(NAMESPACE, 7, 70)
    assert sums(session) == ListedNode(
        str(session), header, "session", 603, 2, 2, 1, 2000, 0.0, 3.0, 1, None
    )
    nothing = NodeId(NAMESPACE, 99)
    assert sums(nothing) == ListedNode(
        str(nothing), store, "header", 0, 0, 0, 0, 0, 0.0, 0.0, 0, None
    )


def test_node_tells_its_model_and_whether_that_is_served() -> None:
    def told(node_id: NodeId, *served: bytes) -> tuple[bool | None, str | None]:
        checkpoints = under(node_id, CHECKPOINTS)
        node = node_of(node_id, checkpoints, {NAMESPACE: "coder"}, [Namespace(n) for n in served])
        return node.is_served, node.model

    assert told(NodeId(NAMESPACE, 7), NAMESPACE) == (True, "coder")
    assert told(NodeId(OTHER_NAMESPACE), NAMESPACE) == (False, None)
    assert told(NodeId(NAMESPACE)) == (None, "coder")
    assert told(STORE, NAMESPACE) == (None, None)


def test_pages_of_a_level_are_its_whole_list() -> None:
    header = NodeId(NAMESPACE, 7)
    pages = [listed(header, offset, 2) for offset in (0, 2, 4)]
    assert [len(page) for page in pages] == [2, 1, 0]
    assert [child for page in pages for child in page] == listed(header)


def test_ids_of_nodes_are_read_as_they_are_written() -> None:
    ids = [STORE, NodeId(NAMESPACE), NodeId(NAMESPACE, 0), NodeId(NAMESPACE, 7, 2**63 - 1)]
    assert [parse_node_id(str(node_id)) for node_id in ids] == ids
    assert [node_id.level for node_id in ids] == ["store", "namespace", "header", "session"]
    assert [node_id.parent for node_id in ids[1:]] == [STORE, ids[1], NodeId(NAMESPACE, 7)]
    for text in ("nonsense", "ab" * 16 + "/x", "ab" * 16 + "/1/2/3", "zz" * 16, "/"):
        with pytest.raises(ValueError):
            parse_node_id(text)
