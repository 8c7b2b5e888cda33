"""Which states belong together for people to look at: those of one header, those of one session.

Owns: `family_of`. Pure. Nothing is planned by it; a wrong family shows in a list and costs nothing.
"""

from collections.abc import Iterable

import xxhash

from proxy.core.cuts import SLACK_TOKENS
from proxy.core.model import Candidate, CheckpointKind, Cuts, Family
from proxy.core.prefix import Namespace, TokenIds, tokens_to_bytes

_SHARED_KINDS = (CheckpointKind.HEADER, CheckpointKind.BRANCH)


def family_of(
    namespace: Namespace,
    tokens: TokenIds,
    kind: CheckpointKind,
    cuts: Cuts,
    relatives: Iterable[Candidate],
) -> Family:
    """Return the family of a new state; *relatives* are the checkpoints that share a prefix with it.

    Two states are of one session if they share a user message's end, or the whole of the shorter one: what
    only repeats the header, and what clients put before each first message, is another session.
    """
    known = [r for r in relatives if r.checkpoint.namespace == namespace]
    header_id = _header_id(namespace, tokens, cuts.header) or _inherited_header(known)
    places = (cuts.turn_start, len(tokens))
    for relative in known:
        older = relative.checkpoint.family
        is_near = older.session_id and older.header_id == header_id
        if is_near and _is_reached(relative, places, cuts.header):
            return Family(header_id, older.session_id)
    if kind in _SHARED_KINDS:
        return Family(header_id)
    return Family(header_id, _id_of(namespace, tokens_to_bytes(tokens)))


def _header_id(namespace: Namespace, tokens: TokenIds, n_header: int) -> int:
    if not 0 < n_header <= len(tokens):
        return 0
    return _id_of(namespace, tokens_to_bytes(tokens[:n_header]))


def _inherited_header(relatives: Iterable[Candidate]) -> int:
    """Return the header of whatever shares it whole, if the state's own was not looked for."""
    for relative in relatives:
        checkpoint = relative.checkpoint
        if 0 < checkpoint.header <= relative.n_common and checkpoint.family.header_id:
            return checkpoint.family.header_id
    return 0


def _is_reached(relative: Candidate, own_places: Iterable[int], n_header: int) -> bool:
    """Return whether a new state and a relative share a place that only their session has."""
    older = relative.checkpoint
    places = {*own_places, older.turn_start, older.n_tokens}
    if not older.turn_start:
        # The generation prompt behind it may have been rendered otherwise since.
        places.add(older.n_prompt - SLACK_TOKENS)
    n_header = max(n_header, older.header)
    return any(n_header < place <= relative.n_common for place in places)


def _id_of(namespace: Namespace, data: bytes) -> int:
    """Return a number that fits into a signed 64-bit one, and is not 0."""
    return xxhash.xxh3_64_intdigest(namespace + data) >> 1 or 1
