"""Which states are of one header and one session, by what they share and where it ends."""

from typing import Any

from proxy.core.eviction import family_of
from proxy.core.model import Candidate, CheckpointKind, Cuts, Family
from proxy.core.tokens import common_prefix_length, hash_prefixes
from tests.unit.builders import NAMESPACE, OTHER_NAMESPACE, branch, candidate, checkpoint, run_of

CONVERSATION, HEADER = CheckpointKind.CONVERSATION, CheckpointKind.HEADER
CUTS = Cuts(header=500, turn_start=600)


def family(n_common: int, n_tokens: int, *relatives: Candidate, **changes: Any) -> Family:
    """Return the family of a state that shares *n_common* tokens with every `run_of`."""
    cuts = changes.pop("cuts", CUTS)
    new = checkpoint(n_tokens, header=cuts.header, turn_start=cuts.turn_start, **changes)
    return family_of(new, branch(n_common, n_tokens), relatives)


FIRST = family(700, 700)


def first(n_common: int, **changes: Any) -> Candidate:
    """Return the first state of a session, as a relative that shares *n_common* tokens."""
    facts = {"family": FIRST, "header": 500, "turn_start": 600, "n_prompt": 605, **changes}
    return candidate(700, n_common, **facts)


def test_state_founds_a_session_and_later_ones_join_it() -> None:
    assert FIRST.header_id and FIRST.session_id
    later = Cuts(header=500, turn_start=900)
    for n_common, cuts in ((700, CUTS), (650, later), (600, later), (600, CUTS)):
        assert family(n_common, 1000, first(n_common), cuts=cuts) == FIRST
    assert family(1000, 1000, first(700)) == FIRST


def test_state_that_shares_only_what_comes_before_its_message_is_of_another_session() -> None:
    """Clients put hundreds of tokens before a first message that are the same in every session."""
    other = family(590, 1000, first(590))
    assert other.header_id == FIRST.header_id
    assert other.session_id not in (0, FIRST.session_id)


def test_header_is_of_no_session_and_brings_nobody_together() -> None:
    header = family(500, 500, kind=HEADER, cuts=Cuts(header=500))
    assert header == Family(FIRST.header_id)
    found = candidate(500, 500, kind=HEADER, header=500, family=header)
    other = family(520, 900, found, first(520))
    assert other.header_id == FIRST.header_id and other.session_id != FIRST.session_id


def test_headers_differ_by_a_single_token_at_their_end() -> None:
    other = family(499, 1000, first(499))
    assert other.header_id not in (0, FIRST.header_id)
    assert len(hash_prefixes(NAMESPACE, run_of(499))) == len(hash_prefixes(NAMESPACE, run_of(500)))


def test_state_without_cuts_belongs_to_whatever_it_goes_on_with() -> None:
    no_cuts = Cuts()
    assert family(700, 900, first(700), cuts=no_cuts) == FIRST
    alone = family(700, 700, cuts=no_cuts)
    assert alone.header_id == 0
    prompt = {"family": alone, "header": 0, "turn_start": 0, "n_prompt": 605}
    # Reasoning that is dropped, and the end of the prompt rendered otherwise.
    assert family(595, 900, first(595, **prompt), cuts=no_cuts) == alone
    assert family(500, 900, first(500, **prompt), cuts=no_cuts) != alone


def test_nothing_is_shared_between_namespaces() -> None:
    other = family(700, 900, first(700), namespace=OTHER_NAMESPACE)
    assert other.header_id != FIRST.header_id and other.session_id != FIRST.session_id
    assert common_prefix_length(run_of(700), branch(700, 900)) == 700
