"""The store as a tree: where checkpoints lie, what nodes sum up, and that one level is lazy."""

import pytest

from proxy.core.model import Checkpoint, CheckpointId, Family
from proxy.explain.views import (
    STORE,
    Level,
    Node,
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


def shown(node_id: NodeId) -> list[NodeId | int]:
    return [child.id for child in children_of(node_id, under(node_id, CHECKPOINTS))]


def test_each_level_lists_the_last_used_first_and_checkpoints_by_length() -> None:
    mine, header = NodeId(NAMESPACE), NodeId(NAMESPACE, 7)
    assert shown(STORE) == [NodeId(OTHER_NAMESPACE), mine]
    assert shown(mine) == [NodeId(NAMESPACE, 0), header]
    assert shown(header) == [NodeId(NAMESPACE, 7, 71), NodeId(NAMESPACE, 7, 70), 1]
    assert shown(NodeId(NAMESPACE, 7, 70)) == [2, 3]


def test_node_sums_up_what_lies_under_it() -> None:
    header = NodeId(NAMESPACE, 7)
    assert node_of(header, under(header, CHECKPOINTS)) == Node(
        header, 500, 4, 3, 1, 3050, 0.0, 4.0, 5
    )
    session = NodeId(NAMESPACE, 7, 70)
    assert node_of(session, under(session, CHECKPOINTS)) == Node(
        session, 603, 2, 2, 1, 2000, 0.0, 3.0, 1
    )
    nothing = NodeId(NAMESPACE, 99)
    assert node_of(nothing, under(nothing, CHECKPOINTS)) == Node(
        nothing, 0, 0, 0, 0, 0, 0.0, 0.0, 0
    )


def test_pages_of_a_level_are_its_whole_list() -> None:
    header = NodeId(NAMESPACE, 7)
    pages = [children_of(header, under(header, CHECKPOINTS), offset, 2) for offset in (0, 2, 4)]
    assert [len(page) for page in pages] == [2, 1, 0]
    assert [child.id for page in pages for child in page] == shown(header)


def test_ids_of_nodes_are_read_as_they_are_written() -> None:
    ids = [STORE, NodeId(NAMESPACE), NodeId(NAMESPACE, 0), NodeId(NAMESPACE, 7, 2**63 - 1)]
    assert [parse_node_id(str(node_id)) for node_id in ids] == ids
    assert [node_id.level for node_id in ids] == list(Level)[:4]
    assert [node_id.parent for node_id in ids[1:]] == [STORE, ids[1], NodeId(NAMESPACE, 7)]
    for text in ("nonsense", "ab" * 16 + "/x", "ab" * 16 + "/1/2/3", "zz" * 16, "/"):
        with pytest.raises(ValueError):
            parse_node_id(text)
