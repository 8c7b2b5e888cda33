"""The values that the pure core decides about.

Owns: rule, checkpoint, prompt and cut, how a rule applies to them, and which namespace a model and a tenant
have. Everything here is frozen; nothing here awaits, opens, logs or reads a clock.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import blake2b
from typing import NamedTuple, NewType, TypeAlias

import msgspec
import xxhash

from proxy.core.tokens import Namespace, TokenIds

CheckpointId = NewType("CheckpointId", int)
SlotId = NewType("SlotId", int)


class RuleKind(StrEnum):
    """Where llama-server can continue a restored state."""

    ANY_PREFIX = "any prefix"
    RESTORE_POINTS = "restore points"
    END_ONLY = "end only"
    NOTHING = "nothing"


NEAR_TOKENS, FAR_TOKENS = 64, 8192
"""How close two context checkpoints may be. Builds that write files of version 2 want 64 tokens (b8672,
April 2026), 256 (b9538, June) or 8,192 between them (b9873 to b10566, July and August), measured. Later
builds want no distance at a prompt's end (server-context.cpp, create_checkpoint)."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A learned rule; `end_holds_from` is the shortest state that can be continued at its very end.

    If it is not 0, the model has a sliding window: a state shorter than the window has every position, and
    can only be continued at a context checkpoint. Under *end only* llama-server makes no context checkpoint
    within `stride_tokens` behind another one.
    """

    kind: RuleKind
    end_holds_from: int = 0
    stride_tokens: int = NEAR_TOKENS

    @property
    def needs_repair(self) -> bool:
        """Whether a saved window must be repaired: llama-server wants one position more of a restored one.

        For the same reason it refuses a window that is not full (server-context.cpp, `pos_min_thold`).
        """
        return self.end_holds_from > 0

    @property
    def can_restore(self) -> bool:
        return self.kind is not RuleKind.NOTHING

    @property
    def is_any_prefix(self) -> bool:
        return self.kind is RuleKind.ANY_PREFIX

    @property
    def is_restore_points(self) -> bool:
        return self.kind is RuleKind.RESTORE_POINTS

    @property
    def is_end_only(self) -> bool:
        return self.kind is RuleKind.END_ONLY


NO_RULE = Rule(RuleKind.NOTHING)


class CheckpointKind(StrEnum):
    """Why a checkpoint is kept; decides what may supersede it."""

    HEADER = "header"
    TURN_START = "turn start"
    BRANCH = "branch"
    CONVERSATION = "conversation"


@dataclass(frozen=True, slots=True)
class Family:
    """The header that a state begins with and the session that it belongs to, for display.

    Both are hashes. They are 0 if the header was not looked for, or if several sessions share the state.
    """

    header_id: int = 0
    session_id: int = 0


class FilePart(NamedTuple):
    """A piece of a state file: its length and its xxh3-128 digest."""

    n_bytes: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Why a checkpoint is never used again, in words, and since when, in seconds since 1970."""

    why: str
    since: float


class Title(NamedTuple):
    """The name of a conversation for people: its user's first words and its client; empty if not known."""

    words: str = ""
    client: str = ""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One saved state, and where it can be continued; cuts and points are numbers of tokens."""

    id: CheckpointId
    namespace: Namespace
    kind: CheckpointKind
    n_tokens: int
    restore_points: tuple[int, ...]
    """From the context checkpoints in the file, ascending, without the end of the state."""
    has_every_position: bool
    """Whether it can be cut anywhere: the file has attention state of each token and nothing recurrent."""
    file_name: str
    size_bytes: int
    created_at: float
    last_used_at: float
    n_prompt: int = 0  # the tokens behind these were generated; 0 if that is not known
    header: int = 0  # this cut of the prompt and the next are 0 if they are not known
    turn_start: int = 0
    is_pinned: bool = False  # kept until an operator unpins it
    marks: tuple[int, ...] = ()  # other cuts, ascending, to which requests may come back
    n_restores: int = 0
    family: Family = Family()
    quarantine: Quarantine | None = None
    parts: tuple[FilePart, ...] = ()  # with digests from right after llama-server wrote the file
    checksum: str = ""  # of the whole file, in place of parts, in records of older versions
    verified_at: float = 0.0  # when the file last matched its digests
    ancestors: tuple[CheckpointId, ...] = ()
    """The checkpoints from which its slot was restored, directly or not."""
    title: Title = Title()  # empty in records of older versions
    shared_id: str = ""  # its id in the shared store, empty if it is not there
    is_fetched: bool = False  # whether it was saved on another machine
    n_messages: int = 0  # 0 in records of older versions, and where the prompt is no chat

    @property
    def content(self) -> tuple[FilePart, ...]:
        """The parts of the file: a single part if only the whole file has a checksum."""
        return self.parts or (FilePart(self.size_bytes, bytes.fromhex(self.checksum)),)

    def end_within(self, n_tokens: int) -> int:
        """Return where this state can be continued at the latest within the first *n_tokens*; else 0."""
        ends = (*self.restore_points, self.n_tokens)
        return n_tokens if self.has_every_position else highest_point(ends, n_tokens)

    def may_stem_from(self, damaged: "Checkpoint") -> bool:
        """Return whether this state may derive from a *damaged* file that was restored.

        A state that was saved before the file was last verified does not.
        """
        return damaged.id in self.ancestors and self.created_at >= damaged.verified_at


@dataclass(frozen=True, slots=True)
class Candidate:
    """A stored checkpoint and how many leading tokens it shares with a request, compared one by one.

    `is_warm` says that the checkpoint's file is likely in the page cache.
    """

    checkpoint: Checkpoint
    n_common: int
    is_warm: bool = False


def title_of(title: Title, family: Family, relatives: Iterable[Candidate]) -> Title:
    """Return the title of a new checkpoint: that of its session if its own is not known.

    A state that several sessions share has no words.
    """
    if not family.session_id:
        return title._replace(words="")
    known = (r.checkpoint for r in relatives)
    return title if any(title) else next((c.title for c in known if c.family == family), title)


@dataclass(frozen=True, slots=True)
class ExpectedState:
    """A state of `tokens` that will be saved at about `expected_at` on the monotonic clock.

    `has_every_position` says that the server's states can be cut anywhere.
    """

    tokens: TokenIds
    namespace: Namespace
    expected_at: float
    size_bytes: int
    restore_points: tuple[int, ...] = ()
    has_every_position: bool = True

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Cuts:
    """Stable cuts of one prompt, in tokens; 0 where there is none.

    `header` is the end of tools and system prompt, `turn_start` the end of the last user message, and
    `message_end` the end of the last complete message. The newest user message begins at `last_turn_end`.
    The first user message may begin with a reminder, which ends at `surroundings`. At `branch` the prompt
    begins to differ from a prompt that was seen before, if no state can be continued there.
    """

    header: int = 0
    turn_start: int = 0
    message_end: int = 0
    branch: int = 0
    last_turn_end: int = 0
    surroundings: int = 0

    @property
    def shared(self) -> int:
        """The end of the prefix that sessions of the same agent in the same directory share."""
        return max(self.header, self.surroundings)

    @property
    def message_begin(self) -> int:
        """Where the newest user message, or what the user wrote of it, begins."""
        return max(self.shared, self.last_turn_end)

    @property
    def ends_with_user(self) -> bool:
        """Whether no complete message follows the last user message."""
        return self.turn_start == self.message_end


NO_CUTS = Cuts()


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's prompt as llama-server will see it; `shape` is the kind of the request.

    `text` is the text that was tokenized; empty if it was not a single text. `conversation` are the digests
    of a Conversation that renders this prompt; empty if there is none. If the prompt `is_before_media`, an
    image or a sound comes next. If it `is_wanted`, it is to be saved even if that does not pay.
    """

    tokens: TokenIds
    namespace: Namespace
    cuts: Cuts = NO_CUTS
    shape: str = ""
    text: str = ""
    conversation: bytes = b""
    title: Title = Title()
    is_before_media: bool = False
    is_wanted: bool = False

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)


class Outcome(StrEnum):
    """The outcome of a generation request that was answered."""

    HIT = "hit"
    PARTIAL = "partial"
    MISS = "miss"
    BYPASS = "bypass"
    DEGRADED = "degraded"
    REFUSED = "refused"
    FAILED = "failed"


# Only `usable_tokens` applies the learned rule; its caller has compared the first n_common tokens, one by
# one. `derive` and `after_save` learn the rule from files.


def usable_tokens(
    rule: Rule, state: Checkpoint | ExpectedState, n_common: int, n_prompt: int
) -> int:
    """Return how many tokens a restore of *state* saves a prompt of *n_prompt* tokens.

    The last token of a prompt is always evaluated (llama-server needs its logits), so the answer is
    below n_prompt; it is at most n_common, and 0 where the rule forbids every restore point.
    """
    reachable = min(n_common, n_prompt - 1)
    if not rule.can_restore:
        return 0
    if rule.is_any_prefix and state.has_every_position:
        return reachable
    # A window that has every position is not full, whatever its length.
    is_within_window = rule.end_holds_from > 0 and state.has_every_position
    if rule.end_holds_from <= state.n_tokens <= reachable and not is_within_window:
        return state.n_tokens
    return highest_point(state.restore_points, reachable) if rule.is_restore_points else 0


def highest_point(points: tuple[int, ...], limit: int) -> int:
    """Return the highest of the ascending *points* that is not above *limit*, or 0."""
    index = bisect_right(points, limit)
    return points[index - 1] if index else 0


FULL_WINDOW_TOKENS = 2200
"""A state this long fills the sliding windows of most models; shorter states are not relied on."""


def derive(
    *, has_points: bool, has_every_position: bool, holds_at_end: bool, rewinds: bool
) -> Rule:
    """Return the rule that a saved state shows; one without every position may fill a sliding window.

    The file tells whether the state has context checkpoints and every position. It is restored to see
    whether it *holds_at_end* (a request can continue it at its end) and *rewinds* (a request can continue
    it before its end). The cases:

    1. The file has context checkpoints: *restore points*. With every position it is a sliding window.
    2. The file lacks positions, or is not understood: *end only*; *nothing* if it does not hold at its end,
       as hybrid states on b9294 (May 2026).
    3. The state rewinds: *any prefix*.
    4. The state does not rewind: it is a sliding window, and a short state may hold at its end.
    """
    if has_every_position and rewinds and not has_points:
        return Rule(RuleKind.ANY_PREFIX)
    if not (has_points or has_every_position or holds_at_end):
        return NO_RULE
    kind = RuleKind.RESTORE_POINTS if has_points else RuleKind.END_ONLY
    return Rule(kind, FULL_WINDOW_TOKENS if has_every_position and not holds_at_end else 0)


def after_save(rule: Rule, *, has_every_position: bool, window_tokens: int = 0) -> Rule:
    """Return the rule after another save, whose file may show a full window of *window_tokens*.

    A state whose file lacks positions cannot be cut anywhere: with --swa-full such a file is the only sign
    of a sliding window. A state that fills its window can be continued at its end.
    """
    if rule.is_any_prefix and not has_every_position:
        return replace(rule, kind=RuleKind.END_ONLY)
    if 0 < window_tokens < rule.end_holds_from:
        return replace(rule, end_holds_from=window_tokens + 1)
    return rule


# Which known namespace a model belongs to, by the model's predictions (its canary). Weights that were
# replaced under the same path, a merged adapter or a rope flag do not show in any field of llama-server's
# API, only in the predictions. Measured differences: 0.0 between processes, -np, -c and thread counts,
# 0.0013 with flash attention off, 0.08 and more with another rope scale.


CANARY_TOKENS = tuple((index * 2654435761 + 97) % 30011 for index in range(128))
"""Fixed ids, spread over the vocabulary; taken modulo its size. The last one is evaluated alone,
in another slot, to see whether llama-server then clears the slot with the others."""

TOLERANCE = 0.01

Canary: TypeAlias = list[tuple[int, float]]
"""The likeliest next tokens with their log-probabilities, the likeliest first."""


class KnownNamespace(msgspec.Struct, frozen=True):
    """A namespace's id and its canary; `name` is the model's name when it was last served."""

    id: bytes
    canary: Canary
    name: str = ""


def choose_namespace(known: Iterable[KnownNamespace], canary: Canary) -> KnownNamespace | None:
    """Return the known namespace whose canary is *canary* within the tolerance, or None."""
    return next((entry for entry in known if is_same_canary(entry.canary, canary)), None)


def is_same_canary(left: Canary, right: Canary, tolerance: float = TOLERANCE) -> bool:
    """Return whether two canaries come from the same model.

    The tail of the list may differ by near ties. Each likeliest token must be in the other list, half of
    all tokens must be shared, and every shared token must have the same log-probability.
    """
    if not left or not right:
        return False
    a, b = dict(left), dict(right)
    shared = a.keys() & b.keys()
    if left[0][0] not in b or right[0][0] not in a or 2 * len(shared) < len(a):
        return False
    return all(abs(a[token] - b[token]) <= tolerance for token in shared)


_SECRET_ID_BYTES = 4
_NO_KEY = bytes(_SECRET_ID_BYTES + 16)
"""The first bytes of a salted tenant without an API key."""


def keyed_tenant(secret: bytes, digest: bytes, purpose: bytes = b"") -> bytes:
    """Return a directory's name for the tenant of an API key's *digest*; the secret's id comes first."""
    secret_id = blake2b(key=secret, digest_size=_SECRET_ID_BYTES).digest()
    return secret_id + blake2b(digest, key=secret, person=purpose, digest_size=16).digest()


def salted_tenant(secret: bytes, tenant: bytes, salt: str) -> bytes:
    """Return a tenant split further by the `cache_salt` of a request: two names, the key's first."""
    name = keyed_tenant(secret, salt.encode(errors="surrogatepass"), b"cache_salt")
    return (tenant or _NO_KEY) + name


def tenant_without_key(tenant: bytes) -> bytes:
    """Return a tenant for a server where API keys make no difference: only the salt remains."""
    return _NO_KEY + salt if (salt := tenant[len(_NO_KEY) :]) else b""


def is_of_other_secret(secret: bytes, tenant: bytes) -> bool:
    """Return whether a tenant was named with the secret of another directory."""
    ours = keyed_tenant(secret, b"")[:_SECRET_ID_BYTES]
    return len(tenant) >= len(_NO_KEY) and not tenant[-len(_NO_KEY) :].startswith(ours)


def tenant_namespace(model_namespace: Namespace | None, tenant: bytes) -> Namespace:
    """Return the namespace of one tenant of a model."""
    digest = xxhash.xxh3_128(model_namespace or b"no model namespace")
    digest.update(tenant)
    return Namespace(digest.digest())
