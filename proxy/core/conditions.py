"""What can keep the proxy from caching as it should: a closed set, each with its words and its cure.

Owns: `DegradationKind`, the one table of conditions, and the state that follows from active conditions.
/health, the log, the metrics, the live page, `doctor` and docs/monitoring.md read this table. Must never
know how a condition is noticed, or when it began.
"""

import ast
import inspect
from collections.abc import Iterable
from enum import StrEnum
from functools import cache
from itertools import pairwise


@cache
def docstrings_of_fields(kind: type) -> dict[str, list[str]]:
    """Return the paragraphs of the docstring below each field of a class, by the field's name.

    They are the words for people: of conditions here, of causes, metrics and settings elsewhere.
    """
    (definition,) = ast.parse(inspect.getsource(kind)).body
    texts: dict[str, list[str]] = {}
    for field, below in pairwise(ast.iter_child_nodes(definition)):
        if isinstance(field, ast.Assign | ast.AnnAssign) and isinstance(below, ast.Expr):
            target = field.target if isinstance(field, ast.AnnAssign) else field.targets[0]
            paragraphs = inspect.cleandoc(ast.literal_eval(below.value)).split("\n\n")
            texts[ast.unparse(target)] = [" ".join(lines.split()) for lines in paragraphs]
    return texts


class State(StrEnum):
    """How requests are served: with the cache, with less of it, or without."""

    CACHING = "caching"
    DEGRADED = "degraded"
    FORWARDING = "forwarding"


class DegradationKind(StrEnum):
    """One reason why requests are served slower, or less safely, than they could be.

    Below each stands what it means, then what to do: its `reason` and its `cure`. `leads_to` is the state
    while the condition lasts.
    """

    _value_: str
    leads_to: State

    def __new__(cls, kind: str, leads_to: State = State.FORWARDING) -> "DegradationKind":
        member = str.__new__(cls, kind)
        member._value_, member.leads_to = kind, leads_to
        return member

    @property
    def reason(self) -> str:
        return _WORDS[self.name][0]

    @property
    def cure(self) -> str:
        return _WORDS[self.name][1]

    STORE_NOT_OPEN = "store not open"
    """slot_save_path cannot be opened: requests are served without the cache.

    Give it to the proxy's user (chown -R), or see the error; restart.
    """
    DIRECTORY_IS_OPEN = "directory is open to others", State.CACHING
    """Other users of this machine can read slot_save_path. States contain whole conversations.

    chmod 700 it, or 2770 if llama-server runs as another user of the same group; restart.
    """
    DIRECTORY_IS_READ_ONLY = "directory is read-only", State.DEGRADED
    """slot_save_path cannot be written: stored states are restored, but nothing is saved.

    None needed if that is wanted; else make it writable for the proxy's user; restart.
    """
    DIRECTORY_IS_NO_USE = "nothing can be read or saved"
    """slot_save_path cannot be written, and has no state of this model and build.

    Make it writable for the proxy's user, or choose another; restart.
    """
    STATE_ENDED_SERVER = "a state ended llama-server", State.CACHING
    """llama-server ended while it used a state. That state is never used again, and is deleted first.

    None needed if llama-server was killed; else report it, with the end of llama-server's log. The notice
    ends when the checkpoint is deleted: `llama-prefix-cache rm ID`.
    """
    SHARED_STORE_AWAY = "shared store away", State.DEGRADED
    """shared_store does not answer as it should. Only states of this machine are used meanwhile.

    Look at the error: address, credentials, network. Tried again within a minute.
    """

    UNREACHABLE = "llama-server unreachable"
    """llama-server does not answer. Requests wait up to upstream_wait_seconds.

    Start llama-server, or correct `upstream` (--upstream URL): without --port, llama-server 0.7.0 listens
    on 9931.
    """
    SILENT = "llama-server is silent", State.DEGRADED
    """llama-server takes connections but has not answered for seconds. Requests to it wait.

    None needed if it ends by itself. Else see whether llama-server is stopped or swapped out, or has fewer
    threads (--threads-http) than clients at once.
    """
    LOADING = "llama-server is loading"
    """llama-server is still loading its model. Requests wait for it up to upstream_wait_seconds.

    None needed if it ends by itself. Else something before llama-server, such as a load balancer, answers
    503 in its place: see whether llama-server runs.
    """
    API_KEY_REFUSED = "llama-server wants an API key"
    """llama-server was started with --api-key, and refuses the proxy's own calls.

    Give the proxy that key: LLAMA_PREFIX_CACHE_UPSTREAM_API_KEY=KEY, or upstream_api_key in its file.
    """
    NOT_A_LLAMA_SERVER = "not a llama-server"
    """What answers at `upstream` is neither a llama-server with slots nor a known host of models.

    Point `upstream` (--upstream URL) at llama-server itself, not at a proxy before it; leave out /v1; with
    --api-prefix, add the prefix to the URL. Nothing to do for a model of llama-swap that is vLLM,
    whisper.cpp or the like: its requests pass through.
    """
    SEVERAL_SERVERS = "several llama-servers"
    """Several llama-servers answer at `upstream` in turns: which of them gets a request, or a save, cannot
    be told. Requests are forwarded as they come.

    Have the load balancer send to one of them. Or give the proxy the address of each, separated by commas:
    it goes on with a conversation where that is held.
    """
    ATTACHING = "attaching"
    """First contact: slots are being saved and the model is being identified.

    None needed: it ends by itself.
    """

    PROCESS_HAS_NO_NAME = "restarts cannot be told"
    """The proxy could not notice a restart of llama-server, and would count on states that are gone.

    Start llama-server with --metrics.
    """
    NO_SLOT_SAVE_PATH = "no slot save path"
    """llama-server was started without --slot-save-path: nothing can be saved or restored.

    Start it with --slot-save-path, the directory that the proxy has as slot_save_path, and with the other
    flags in docs/llama-server.md; `run` sets all of them.
    """
    OTHER_DIRECTORY = "another slot save path"
    """llama-server saved a slot, but not into slot_save_path.

    Give both the same directory; in containers, mount the same one into both. The proxy belongs on
    llama-server's machine.
    """
    FILES_UNREADABLE = "files unreadable"
    """The proxy may not read the files that llama-server writes.

    Run both as the same user, or share a group: docs/security.md, Two users.
    """
    IDLE_SLOTS_CLEARED = "idle slots are cleared", State.DEGRADED
    """A starting slot empties all idle slots. The proxy saves them first; requests start one at a time.

    Start llama-server with an explicit -np and with --cache-ram 0 (or --no-cache-idle-slots).
    """
    EVERY_SLOT_BUSY = "every slot is busy"
    """Every slot was busy at first contact, so the model could not be identified.

    None needed: the proxy tries again every 15 seconds.
    """
    ONLY_EMBEDDINGS = "only embeddings", State.CACHING
    """llama-server was started with --embeddings, for a model without pooling: it makes embeddings, and
    would end at a completion. Its requests pass through.

    None needed for embeddings. For completions start llama-server without --embeddings.
    """
    ATTACH_FAILED = "attaching failed"
    """llama-server could not be examined at first contact.

    Look at the error. If llama-server is unable to save a slot, its disk is full, or it may not write
    there: docs/security.md, Two users. The proxy tries again, after 15 seconds at first.
    """

    RULE_IS_NOTHING = "nothing can be restored"
    """This model on this llama-server reuses nothing of a restored state.

    With a sliding window, start llama-server with --swa-full (it takes more memory), or use llama.cpp 0.7.0
    or later without --ctx-checkpoints 0. Otherwise restart it; if that does not help, this build cannot do
    it.
    """

    SAVES_FAIL = "saves fail", State.DEGRADED
    """The last save failed: what its slot holds is lost when another request takes the slot.

    Look at the error; most often the disk is full. It ends with the next save that succeeds.
    """
    NO_ROOM = "no room for states", State.DEGRADED
    """There is no room for another state: what a slot holds is lost when another request takes it.

    If the error names the budget, raise max_store_bytes or unpin checkpoints; if free space, free some.
    It ends with the next save that finds room.
    """
    WRITE_BUDGET_SPENT = "write budget spent", State.DEGRADED
    """Little is left of max_write_bytes_per_day: a state that is not worth its bytes is not saved.

    None needed. Raise the budget if this happens daily. It ends once half of the budget is left.
    """
    RESTORES_REFUSED = "restores refused", State.DEGRADED
    """llama-server refused to restore a checkpoint, which is not offered again.

    None needed if it was one damaged file. It ends with the next restore that succeeds.
    """
    RESTORES_NOT_REUSED = "restores not reused", State.DEGRADED
    """A restore succeeded but its tokens were evaluated again; the checkpoint is not offered again.

    If it keeps coming back, report it. It ends with the next restore that is reused.
    """
    ERASES_REFUSED = "erases refused", State.DEGRADED
    """llama-server refused to erase a slot; requests that need a clean one reuse nothing.

    Look at the error. It ends with the next erase that succeeds.
    """
    LOOKUPS_FAIL = "lookups fail", State.DEGRADED
    """The index cannot be read, so no checkpoint is found.

    Look at the error and at the disk. It ends with the next lookup that succeeds.
    """
    SLOTS_NOT_SHOWN = "slots not shown", State.DEGRADED
    """GET /slots is off: requests whose slot llama-server chooses itself hold all free slots.

    Start llama-server without --no-slots.
    """
    PLACED_ELSEWHERE = "placed elsewhere", State.DEGRADED
    """llama-server ran a request in another slot than the one that the proxy had prepared.

    Send all traffic through the proxy, and start llama-server without --slot-prompt-similarity. It ends
    with the next such request that runs in the prepared slot.
    """
    TOKENIZED_OTHERWISE = "tokenized otherwise", State.DEGRADED
    """llama-server made other tokens of a kind of request than predicted; that kind is served uncached.

    None; please report it, with the chat template and the fields of the request.
    """
    SEVERAL_API_KEYS = "several API keys", State.CACHING
    """Several API keys or salts are in use. llama-server's RAM cache, which the proxy cannot see, would
    share prompts between them.

    Start llama-server by `run`, which turns that cache off, or with --cache-ram 0; or set
    share_between_api_keys if they are one household. Without `run` the notice stays.
    """


_WORDS = docstrings_of_fields(DegradationKind)
_K = DegradationKind

PASSING = frozenset((_K.ATTACHING, _K.LOADING))
"""Every start begins with these, and they end by themselves."""
_OF_STORE = {_K.STORE_NOT_OPEN, _K.DIRECTORY_IS_OPEN, _K.STATE_ENDED_SERVER, _K.SHARED_STORE_AWAY}
OF_PROCESS = frozenset(_K) - _OF_STORE
"""These end when the llama-server process ends at which they began."""


def state_under(active: Iterable[DegradationKind]) -> State:
    """Return how requests are served while the *active* degradations last."""
    return worst_of(kind.leads_to for kind in active)


def worst_of(states: Iterable[State]) -> State:
    return max(states, key=list(State).index, default=State.CACHING)
