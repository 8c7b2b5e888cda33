"""What operators see at a glance: how requests are served, the slots, the queue, what was saved today.

Owns: the JSON of /overview and /events (docs/live-page.md). Pure.
"""

import msgspec

from proxy.core.explaining.records import RequestRecord


class SlotView(msgspec.Struct, frozen=True, kw_only=True):
    """One slot; `n_tokens` and what follows it are 0 where its content is not known.

    `n_coming` is how long the prompt is that is being served there. `used_at` is when it was leased or
    given back, in seconds since 1970; null if that was before the proxy was started.
    """

    id: int
    state: str
    is_closing: bool = False
    n_tokens: int = 0
    n_header: int = 0
    n_unsaved: int = 0
    n_coming: int = 0
    used_at: float | None = None


class ServerView(msgspec.Struct, frozen=True, kw_only=True):
    """A llama-server that the proxy is attached to; `n_ctx` is what one slot holds.

    `name` is the model where one address has several, else the address.
    """

    name: str
    build: str
    rule: str
    n_ctx: int
    slots: tuple[SlotView, ...]


class StoreView(msgspec.Struct, frozen=True, kw_only=True):
    """The store; `version` changes with it."""

    n_checkpoints: int
    size_bytes: int
    max_bytes: int
    version: int


class Today(msgspec.Struct, frozen=True, kw_only=True):
    """What requests have reused since `since`: midnight, or when the proxy was started.

    Prompts that were not looked up are not counted in `n_prompt`. `saved_seconds` is measured; null while
    nothing was.
    """

    since: float
    n_requests: int = 0
    n_reusing: int = 0
    n_prompt: int = 0
    n_reused: int = 0
    n_restored: int = 0
    n_missed: int = 0
    saved_seconds: float | None = None


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the proxy now, and the requests that have ended since the last look.

    `position` names the look: whoever says it next time gets only what came after it.
    """

    state: str
    since: str
    reasons: tuple[dict[str, str], ...]
    servers: tuple[ServerView, ...]
    n_waiting: int
    store: StoreView | None
    today: Today
    keeps: str
    position: str = ""
    requests: tuple[RequestRecord, ...] = ()
