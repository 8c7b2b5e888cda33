"""What a user of a vendor's SDK sees of an answer, with what differs between any two requests taken out."""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from pydantic import BaseModel

Use = Callable[[Any], Awaitable[object]]
"""One thing that users do with a client; returns all that they see."""

_OWN_TO_A_REQUEST = frozenset(
    ("id", "item_id", "call_id", "created", "created_at", "completed_at", "timings")
)
_CACHED = frozenset(
    ("prompt_tokens_details", "input_tokens_details", "cached_tokens", "cache_creation")
)
_ANTHROPIC_PROMPT = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")


async def seen_by(use: Use, client: Any, error_type: type[Exception]) -> Any:
    """Return what a use shows, an error included, as plain values."""
    try:
        return comparable(await use(client))
    except error_type as error:
        body = getattr(error, "body", None)
        return {"raised": type(error).__name__, "status": getattr(error, "status_code", None)} | {
            "body": body
        }


async def collect(events: Any) -> list[Any]:
    """Return all events of a stream; the SDKs' types do not say that it is one."""
    return [event async for event in events]


async def first_events(stream: Any, n_events: int) -> list[Any]:
    """Return the first events of a stream, which is then left."""
    events: list[Any] = []
    async with AsyncExitStack() as stack:
        stack.push_async_callback(stream.close)
        async for event in stream:
            events.append(event)
            if len(events) == n_events:
                break
    return events


def comparable(value: Any) -> Any:
    """Return plain values without ids and times; of usage only the totals."""
    if isinstance(value, BaseModel):
        # What the SDK does not know (reasoning_content) is among a model's values too.
        return comparable(value.model_dump(warnings=False))
    if isinstance(value, dict):
        return {
            key: _totals(part) if key == "usage" and isinstance(part, dict) else comparable(part)
            for key, part in value.items()
            if key not in _OWN_TO_A_REQUEST
        }
    if isinstance(value, list | tuple):
        return [comparable(part) for part in value]
    return value


def _totals(usage: dict[str, Any]) -> dict[str, Any]:
    """Return a usage whose prompt is counted whole, whatever was cached of it."""
    kept = {key: value for key, value in usage.items() if key not in _CACHED}
    if "cache_read_input_tokens" in usage:
        kept = {key: value for key, value in kept.items() if key not in _ANTHROPIC_PROMPT}
        kept["prompt"] = sum(usage.get(key) or 0 for key in _ANTHROPIC_PROMPT)
    return kept
