"""The store and the recent requests as operators see them.

Owns: the store as a tree, with the sums of each node; traces, which are requests without their texts; and
the JSON that the admin listener, the commands and the live page share (docs/monitoring.md,
docs/live-page.md). Pure.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import accumulate
from operator import attrgetter
from typing import Annotated

import msgspec
import xxhash
from msgspec import Meta

from proxy.core.messages import Kind
from proxy.core.model import Checkpoint, Outcome, Prompt, Quarantine
from proxy.core.rates import Rates, seconds_in_words
from proxy.core.tokens import Namespace
from proxy.explain.causes import Cause, PromptPart
from proxy.explain.compare import Divergence
from proxy.explain.known import SLACK_TOKENS, Match
from proxy.explain.sketch import Cost

# The tree: namespaces, their headers, the sessions of each, their checkpoints. Checkpoints that sessions
# share lie directly under the header. Nothing is kept between two views. A node's id is its path in hex
# digits: namespace/header/session, down to its level; the id of the store is empty.

_LEVELS = ("store", "namespace", "header", "session")


def parent_of(checkpoint: Checkpoint) -> str:
    """Return the id of the node that a checkpoint lies directly under."""
    family = checkpoint.family
    session = f"/{family.session_id:016x}" if family.session_id else ""
    return f"{checkpoint.namespace.hex()}/{family.header_id:016x}{session}"


def path_to(node_id: str) -> list[str]:
    """Return the ids of the nodes from a namespace down to a node, itself included."""
    return list(accumulate(node_id.split("/"), "{}/{}".format))


class ListedCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint as operators see it; `value_seconds` is what losing it would cost.

    Only a running proxy knows the value, and whether the file is likely in memory. `title` are the user's
    first words, empty if they are not known. `model` is the model's name when it was last served; None if
    that is not known. `quarantine` says why the checkpoint is never used again, and since when; None if it
    may be used.
    """

    id: str
    parent: str
    kind: str
    title: str
    client: str
    n_tokens: int
    n_header_tokens: int
    restore_points: tuple[int, ...]
    size_bytes: int
    created_at: float
    last_used_at: float
    n_restores: int
    is_pinned: bool
    is_warm: bool | None = None
    value_seconds: float | None = None
    model: str | None = None
    quarantine: Quarantine | None = None


_LISTED_AS_THEY_ARE = {f.name for f in fields(Checkpoint)} & {
    *ListedCheckpoint.__struct_fields__
} - {"id", "kind", "title"}


def list_checkpoint(
    checkpoint: Checkpoint, names: Mapping[Namespace, str], **more: float | bool
) -> ListedCheckpoint:
    """Return a checkpoint as operators see it; *names* are those of the models of namespaces.

    *more* are the facts that only a running proxy knows.
    """
    return ListedCheckpoint(
        id=f"{checkpoint.id:016x}",
        parent=parent_of(checkpoint),
        kind=checkpoint.kind.value,
        title=checkpoint.title.words,
        client=checkpoint.title.client,
        n_header_tokens=checkpoint.header,
        model=names.get(checkpoint.namespace),
        **{name: getattr(checkpoint, name) for name in _LISTED_AS_THEY_ARE} | more,
    )


class ListedNode(msgspec.Struct, kw_only=True):
    """A node above the checkpoints; its counts are over all checkpoints under it.

    `title` and `client` are those of the newest checkpoint; empty where they are not known, or for several
    sessions. `n_tokens` is the length of a header, or of a session's longest checkpoint; else 0. `seconds`
    is how long evaluating a header takes, or a session behind its header; null while no speed was measured.
    `model` is the name of the checkpoints' model, null if it is not known.
    """

    id: str
    parent: str | None
    level: str
    title: str = ""
    client: str = ""
    n_tokens: int = 0
    n_checkpoints: int = 0
    n_pinned: int = 0
    size_bytes: int = 0
    last_used_at: float = 0.0
    n_restores: int = 0
    seconds: float | None = None
    model: str | None = None

    def add(self, checkpoint: ListedCheckpoint) -> None:
        """Count a checkpoint under this node."""
        self.n_checkpoints += 1
        self.n_pinned += checkpoint.is_pinned
        self.size_bytes += checkpoint.size_bytes
        self.n_restores += checkpoint.n_restores
        self.n_tokens = max(self.n_tokens, checkpoint.n_tokens)
        self.last_used_at = max(self.last_used_at, checkpoint.last_used_at)


class Outline:
    """The nodes of a store, summed up from its checkpoints one by one."""

    def __init__(self) -> None:
        self._nodes = {"": ListedNode(id="", parent=None, level=_LEVELS[0])}
        self._newest: dict[str, ListedCheckpoint] = {}
        """The checkpoint under each node that was used last."""

    def add(self, checkpoint: ListedCheckpoint) -> None:
        for node_id in ("", *path_to(checkpoint.parent)):
            if (node := self._nodes.get(node_id)) is None:
                parent, level = node_id.rpartition("/")[0], _LEVELS[1 + node_id.count("/")]
                node = self._nodes[node_id] = ListedNode(id=node_id, parent=parent, level=level)
            node.add(checkpoint)
            if checkpoint.last_used_at == node.last_used_at:
                self._newest[node_id] = checkpoint

    def nodes(self, rates_by: Mapping[Namespace, Rates], n_at_most: int) -> list[ListedNode]:
        """Return the store, and the nodes that take most room: parents first, then the largest first.

        *rates_by* are the speeds of the namespaces that are served.
        """
        nodes = sorted(self._nodes.values(), key=lambda n: (_LEVELS.index(n.level), -n.size_bytes))
        return [self._described(node, rates_by) for node in nodes[:n_at_most]]

    def _described(self, node: ListedNode, rates_by: Mapping[Namespace, Rates]) -> ListedNode:
        if (newest := self._newest.get(node.id)) is None:
            return node
        is_session = node.level == "session"
        n_header = newest.n_header_tokens if is_session or node.level == "header" else 0
        begin, end = (n_header, node.n_tokens) if is_session else (0, n_header)
        rates = rates_by.get(Namespace(bytes.fromhex(newest.parent.partition("/")[0])))
        evaluation = rates.evaluation_seconds(begin, end) if rates and rates.is_measured else None
        return msgspec.structs.replace(
            node,
            title=newest.title if is_session else "",
            client=newest.client if n_header or is_session else "",
            n_tokens=end,
            seconds=None if evaluation is None else round(evaluation, 3),
            model=newest.model if node.id else None,
        )

    def __len__(self) -> int:
        return len(self._nodes)


# Requests that have ended, and what the live page shows of the day: what was saved.


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One generation request, once it has ended.

    `at` is when it came, in seconds since 1970; the other times are since then. Unknown fields are null or
    empty. `kind` is its role in its conversation. `title` are its user's first words; requests of one
    `conversation` begin with the same ones.
    `n_missed` tokens were evaluated although they were known; `cause` says why, `part` and `message`
    (counted from 0) where in the prompt. `server` says which llama-server, or model, served it where there
    are several. `stops` and `cuts` are in tokens; the cuts are header, turn start and branch, 0 where there
    is none. `alternatives` are the next best plans, after the expected cost of the chosen plan. `shared`
    says whether a state was fetched from the shared store, or why not.
    """

    id: str
    at: float
    path: str
    outcome: str
    cause: Cause
    kind: Kind = Kind.NONE
    title: str = ""
    client: str = ""
    model: str = ""
    conversation: str = ""
    part: PromptPart = PromptPart.NOWHERE
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
    evaluation_seconds: float | None = None
    saved_seconds: float | None = None
    queued_seconds: float | None = None
    prepared_seconds: float | None = None
    first_token_seconds: float | None = None
    seconds: float
    expected_seconds: float | None = None
    alternatives: tuple[str, ...] | None = None
    stops: tuple[int, ...] | None = None
    cuts: tuple[int, int, int] | None = None
    rewrites: tuple[str, ...] | None = None
    shared: str | None = None


class Nearest(msgspec.Struct, frozen=True, kw_only=True):
    """The known prompt that the request is compared with, and how many first tokens they share.

    Without an `id` it is a state, in a slot or file from before the proxy was started; then `n_tokens` is
    not known.
    """

    n_common: int
    id: str | None = None
    n_tokens: int | None = None
    age_seconds: float | None = None


def nearest_of(compared: Match | None, n_shared: int, planned_at: float) -> Nearest | None:
    """Return the *compared* prompt as operators see it, or a stored state that shares more tokens.

    The state shares *n_shared* tokens. The request was planned at *planned_at*, by the monotonic clock.
    """
    if compared is None or compared.n_common < n_shared - SLACK_TOKENS:
        return Nearest(n_common=n_shared) if n_shared else None
    known = compared.known
    return Nearest(
        n_common=compared.n_common,
        id=known.ids[-1],
        n_tokens=len(known.tokens),
        age_seconds=round(planned_at - known.ended_at, 3),
    )


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request reused no more tokens, what would help, and what each part of its prompt `costs`."""

    request: RequestRecord
    says: str
    cure: str
    nearest: Nearest | None = None
    divergence: Divergence | None = None
    costs: list[Cost] = []


OWN_CLIENT = "llama-prefix-cache"
"""The client of requests that the commands send to warm, try out or measure; no sum counts them."""


class Span(msgspec.Struct, array_like=True):
    """What the requests of a minute or an hour have reused; it begins at `since`, in seconds since 1970.

    `saved_seconds` is what evaluating the reused tokens would have taken, less the restores.
    """

    since: float
    n_requests: int = 0
    n_missing: int = 0
    n_reused: int = 0
    n_missed: int = 0
    n_new: int = 0
    saved_seconds: float = 0.0

    def add(self, record: RequestRecord) -> None:
        """Count a request that has ended; one that was not looked up counts as a request only."""
        self.n_requests += 1
        self.n_missing += record.cause.is_miss
        if record.n_prompt is None or record.confirmed is None:
            return
        self.n_reused += record.confirmed
        self.n_missed += record.n_missed
        self.n_new += record.n_prompt - record.confirmed - record.n_missed
        self.saved_seconds += record.saved_seconds or 0.0


def restored_tokens(record: RequestRecord) -> int:
    """Return how many tokens were reused because a restore brought them back."""
    is_restored = record.chosen == "restore" and record.outcome != Outcome.DEGRADED
    return (record.confirmed or 0) * is_restored


class Today(Span, array_like=False):
    """What requests have reused since `since`: midnight, or when the proxy was started first.

    Of the `n_prompt` tokens `n_restored` were reused because a restore brought them back. `n_reusing`
    requests were hits, at least in part.
    """

    n_prompt: int = 0
    n_restored: int = 0
    n_reusing: int = 0

    def add(self, record: RequestRecord) -> None:
        super().add(record)
        self.n_prompt = self.n_reused + self.n_missed + self.n_new
        self.n_restored += restored_tokens(record)
        self.n_reusing += record.outcome in (Outcome.HIT, Outcome.PARTIAL)


MINUTE_SECONDS, HOUR_SECONDS = 60, 3600
N_MINUTES, N_HOURS = 120, 720


class History(msgspec.Struct, kw_only=True):
    """What was reused in the last two hours by minutes, in the last 30 days by hours, and today."""

    today: Today
    minutes: list[Span] = []
    hours: list[Span] = []

    def add(self, record: RequestRecord) -> None:
        """Count a request when it has ended."""
        ended_at = int(record.at + record.seconds)
        self.today.add(record)
        for spans, seconds, n_kept in (
            (self.minutes, MINUTE_SECONDS, N_MINUTES),
            (self.hours, HOUR_SECONDS, N_HOURS),
        ):
            since = ended_at - ended_at % seconds
            if not spans or spans[-1].since < since:  # else the clock was set back
                spans.append(Span(since))
            spans[-1].add(record)
            while spans[0].since <= spans[-1].since - n_kept * seconds:
                del spans[0]


# Requests without their texts, to be given away and replayed, in the format of Mooncake's traces
# (github.com/kvcache-ai/Mooncake, FAST25-release). A line is one request: its time in ms, the lengths of
# its prompt and answer in tokens, and a number for each block of 512 tokens of the prompt. The last block
# may be shorter. Two prompts have the same number if, and only if, they are the same up to the end of that
# block.

TRACED_TOKENS = 512
MOST_SECONDS = 10**9
"""The longest trace; no sleep takes ten times as long."""


class TracedRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of a trace; before `numbered`, its time is since 1970, and its numbers are hashes."""

    timestamp: Annotated[int, Meta(ge=0, le=MOST_SECONDS * 1000)]
    input_length: int
    output_length: int
    hash_ids: Sequence[int]


def traced(at: float, prompt: Prompt, n_answer: int) -> TracedRequest:
    """Return a request that came *at* so many seconds since 1970, with hashes in place of its tokens."""
    running, data, ids = xxhash.xxh3_64(prompt.namespace), memoryview(prompt.tokens), array("Q")
    for begin in range(0, len(data), TRACED_TOKENS):
        running.update(data[begin : begin + TRACED_TOKENS])
        ids.append(running.intdigest())
    return TracedRequest(round(at * 1000), len(data), n_answer, ids)


def numbered(requests: Iterable[TracedRequest]) -> list[TracedRequest]:
    """Return requests in order, with nothing that another trace or a guessed text can be compared with.

    Times are in whole seconds since the first request, and blocks are numbered as they appear.
    """
    ordered, numbers = sorted(requests, key=attrgetter("timestamp")), dict[int, int]()
    return [
        msgspec.structs.replace(
            request,
            timestamp=(request.timestamp - ordered[0].timestamp) // 1000 * 1000,
            hash_ids=[numbers.setdefault(each, len(numbers)) for each in request.hash_ids],
        )
        for request in ordered
    ]


SENT = (RequestRecord, Explanation, ListedCheckpoint, ListedNode, History, TracedRequest)
"""What the admin listener sends as JSON."""


# What people read of requests.


def in_words(record: RequestRecord) -> str:
    """Return the line about an answered request that people read; a miss says its cause."""
    api, took = api_name(record.path), seconds_in_words(record.seconds)
    answered = f"answered in {took}"
    if record.kind is Kind.AHEAD:
        ahead = f"{record.evaluated:,} tokens of the next prompt"
        return f"{api}  {ahead}, {record.kind.value} in {took}"
    if record.cause is Cause.REFUSED:
        said = f": {record.why}" if record.why else ""
        return f"{api}  llama-server refused it (status {record.status}{said})  id {record.id}"
    if record.n_prompt is None or record.confirmed is None:
        if record.chosen is None:
            return f"{api}  {answered}, not cached: {record.why}"
        return f"{api}  ended after {took}, llama-server did not say what it reused  id {record.id}"
    reused = f"{record.confirmed:,} reused ({record.confirmed / max(1, record.n_prompt):.1%})"
    facts = [f"{api}  {record.n_prompt:,} tokens", reused.replace("%", " %")]
    first = record.first_token_seconds
    facts.append(answered if first is None else f"first token {seconds_in_words(first)}")
    if (record.saved_seconds or 0) >= 0.005:
        facts.append(f"saved {seconds_in_words(record.saved_seconds or 0)}")
    where = f"  {record.server}" if record.server else ""
    source = "shared store" if (record.shared or "").startswith("fetched") else "disk"
    where += f"  slot {record.slot}" + f" <- {source}" * (restored_tokens(record) > 0)
    if record.cause is Cause.FIRST_SIGHT:
        where += "  the rest is new" if record.confirmed else "  new"
    elif record.cause.is_miss:
        part = "" if record.part is PromptPart.NOWHERE else f" in {record.part.value}"
        where += f"  miss: {record.cause.value}{part} (explain {record.id})"
    return ", ".join(facts) + where


def line_of(record: RequestRecord) -> dict[str, object]:
    """Return the fields of the log line: all known facts as plain values, and no text of a prompt."""
    unsaid = {"at": record.at, "title": record.title, "n_missed": 0}
    unsaid |= {"cause": Cause.NOT_LOOKED_UP, "part": PromptPart.NOWHERE}
    return {
        name: value
        for name, value in msgspec.to_builtins(record).items()
        if value not in (None, "", unsaid.get(name)) or name in ("confirmed", "evaluated")
    }


def api_name(path: str) -> str:
    """Return what people call the API of a path."""
    return path.removesuffix("/completions").rpartition("/")[2] if "/chat/" in path else path
