"""What is told of one request: a short record, and the explanation of what was reused and what was not.

Owns: the JSON that /requests answers, described in docs/operations.md.
"""

import msgspec

from proxy.core.explaining.causes import Cause, Part

UNANSWERED = "unanswered"


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One generation request, once it has ended.

    `at` is when it came, in seconds since 1970; the other times are since then. What is not known is null.
    `n_missed` tokens were evaluated although they were known; `cause` says why, `part` and `message`
    (counted from 0) where in the prompt. `server` says which llama-server, or model, served it where there
    are several.
    """

    id: str
    at: float
    path: str
    outcome: str
    cause: Cause
    part: Part = Part.NOWHERE
    message: int | None = None
    status: int | None = None
    why: str | None = None
    chosen: str | None = None
    server: str | None = None
    slot: int | None = None
    n_prompt: int | None = None
    expected: int | None = None
    confirmed: int | None = None
    evaluated: int | None = None
    n_missed: int = 0
    saved_seconds: float | None = None
    queued_seconds: float | None = None
    prepared_seconds: float | None = None
    first_token_seconds: float | None = None
    seconds: float
    rewrites: tuple[str, ...] = ()


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """How the request was planned: what that was to cost, and what else there was.

    `cuts` are header, turn start and branch, in tokens, 0 where there is none.
    """

    expected_seconds: float
    displaced_seconds: float
    alternatives: tuple[str, ...] = ()
    stops: tuple[int, ...] = ()
    cuts: tuple[int, int, int] = (0, 0, 0)


class Nearest(msgspec.Struct, frozen=True, kw_only=True):
    """The known prompt that the request is held against, and how many first tokens they share.

    `kind` is request, or state: one in a slot or file, from before the proxy was started. Then it has no
    `id`, and `n_tokens` is not known.
    """

    kind: str
    n_common: int
    id: str | None = None
    n_tokens: int | None = None
    age_seconds: float | None = None


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """Where the two prompts part: `n_common` tokens are the same, then come `known` and `now`.

    The texts are about 20 tokens long; empty unless explain_keep is text. The ids are those of the next
    tokens on both sides.
    """

    n_common: int
    part: Part
    message: int | None = None
    before: str = ""
    known: str = ""
    now: str = ""
    known_ids: tuple[int, ...] = ()
    now_ids: tuple[int, ...] = ()


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request reused what it did, and what would help."""

    request: RequestRecord
    says: str
    cure: str
    way: Way | None = None
    nearest: Nearest | None = None
    divergence: Divergence | None = None
