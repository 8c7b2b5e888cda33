"""Bodies of clients' generation requests: what they ask for, and how they are pinned to a slot.

A body is forwarded byte for byte but for the fields the proxy owns; where those must be added they
are spliced in, so that key order and number formats stay the client's (llama-server renders tool
schemas in the order received). llama-server parses with nlohmann::json: of a repeated key the last
one wins, as it does here.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.core.model import SlotId
from proxy.upstream.anthropic_body import chat_of_messages
from proxy.upstream.responses_body import chat_of_responses
from proxy.upstream.routes import Route

SYSTEM_ROLES = ("system", "developer")
_REMINDER = "<system-reminder>"

# What /apply-template reads besides the messages (oaicompat_chat_params_parse in server-common.cpp).
RENDERING_FIELDS = (
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "reasoning_effort",
    "reasoning_format",
    "response_format",
    "json_schema",
)
_CONVERTED_FIELDS = (
    "messages",
    *RENDERING_FIELDS,
    "add_generation_prompt",
    "continue_final_message",
)


@dataclass(frozen=True, slots=True)
class GenerationBody:
    """A client's body as sent and as read."""

    raw: bytes
    fields: dict[str, Any]

    @property
    def messages(self) -> list[dict[str, Any]]:
        return self.fields["messages"]  # type: ignore[no-any-return]

    def shape(self, path: str) -> str:
        """Return what requests that are rendered alike have in common, for counting and disabling."""
        last_role = self.messages[-1].get("role", "") if self.fields.get("messages") else ""
        return f"{path} {last_role} {','.join(sorted(self.fields))}"


def parse_body(raw: bytes) -> GenerationBody | None:
    """Return the parsed body, or None if it is not a JSON object."""
    try:
        return GenerationBody(raw, msgspec.json.decode(raw, type=dict[str, Any]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class Head(msgspec.Struct):
    """What is read of a body before it is known who serves it, as its client wrote it."""

    stream: Any = False
    model: Any = ""

    @property
    def wants_stream(self) -> bool:
        """Whether the answer comes as a stream."""
        return self.stream is True

    @property
    def named_model(self) -> str:
        """What it calls the model, empty if it does not say."""
        return self.model if isinstance(self.model, str) else ""


def head_of(raw: bytes) -> Head:
    """Return a body's head; an empty one if it is no JSON object."""
    try:
        return msgspec.json.decode(raw, type=Head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Head()


def as_chat_body(route: Route, body: GenerationBody) -> GenerationBody:
    """Return a body in the chat form that renders the same prompt; raises NotConvertible.

    It is only for /apply-template: what a converted one does not need for that is left out.
    """
    match route:
        case Route.MESSAGES:
            chat = chat_of_messages(body.fields)
        case Route.RESPONSES:
            chat = chat_of_responses(body.fields)
        case _:
            return body
    fields = {key: chat[key] for key in _CONVERTED_FIELDS if key in chat}
    return GenerationBody(msgspec.json.encode(fields), fields)


def n_completions(body: GenerationBody) -> int:
    """Return how many slots the request spreads over."""
    n = body.fields.get("n_cmpl")
    if n is None:  # llama-server treats null as absent
        n = body.fields.get("n")
    return int(n) if isinstance(n, int | float) and n > 1 else 1


def bypass_reason(route: Route, body: GenerationBody | None) -> str | None:
    """Return why a request's prompt is not to be looked up, or None if it is.

    What it says of messages is for the chat form to tell. llama-server drops all flags of /v1/messages.
    """
    if route in (Route.PINNED, Route.UNPINNED):
        return f"{route} route"
    if body is None:
        return "body is not a JSON object"
    if route is Route.MESSAGES:
        return None
    if n_completions(body) > 1:
        return "several completions"
    if body.fields.get("lora"):
        return "lora in the request"
    if body.fields.get("n_cache_reuse"):
        return "n_cache_reuse in the request"
    if body.fields.get("cache_prompt") is False:
        return "cache_prompt is false"
    return _prompt_reason(body) if route is Route.COMPLETION else None


def chat_reason(body: GenerationBody) -> str | None:
    """Return why the prompt of a body in the chat form is not to be looked up, or None if it is."""
    messages = body.fields.get("messages")
    if not isinstance(messages, list) or not messages:
        return "no messages"
    if not all(isinstance(message, dict) for message in messages):
        return "malformed messages"
    if any(_has_media(message.get("content")) for message in messages):
        return "media in the request"
    return None


def _has_media(content: Any) -> bool:
    if not isinstance(content, list):
        return False
    return any(not isinstance(part, dict) or part.get("type") != "text" for part in content)


def _prompt_reason(body: GenerationBody) -> str | None:
    prompt = body.fields.get("prompt")
    if isinstance(prompt, str) and prompt:
        return None
    if not isinstance(prompt, list) or not prompt:
        return "no single prompt"
    # A list with a number in it is one prompt; a list of strings only is several.
    kinds = {type(part) for part in prompt}
    return None if kinds <= {int, str} and int in kinds else "several prompts"


def taints_slot(body: GenerationBody) -> bool:
    """Return whether what the slot holds afterwards depends on more than its tokens."""
    return any(body.fields.get(key) for key in ("lora", "n_cache_reuse"))


def pin(body: GenerationBody, slot_id: SlotId, *, reuses: bool = True) -> bytes:
    """Return the body with `id_slot` set, and with `cache_prompt`, which a client can only turn off.

    `n_cache_reuse` 0 keeps a server's --cache-reuse from shifting states, which are then only roughly
    right.
    """
    wants_reuse = body.fields.get("cache_prompt") is not False
    owned: dict[str, Any] = {"id_slot": slot_id, "cache_prompt": reuses and wants_reuse}
    if not body.fields.get("n_cache_reuse"):
        owned["n_cache_reuse"] = 0
    if owned.keys() & body.fields.keys():
        return msgspec.json.encode({**body.fields, **owned})
    start = body.raw.index(b"{") + 1
    spliced = msgspec.json.encode(owned)[1:-1] + (b"," if body.fields else b"")
    return body.raw[:start] + spliced + body.raw[start:]


def without_reuse(body: GenerationBody) -> bytes:
    """Return the body with `cache_prompt` off."""
    return msgspec.json.encode({**body.fields, "cache_prompt": False})


def has_several_texts(message: dict[str, Any]) -> bool:
    """Return whether a message's content is several parts, the last of them a text."""
    content = message.get("content")
    return isinstance(content, list) and len(content) > 1 and "text" in content[-1]


def begins_with_reminder(message: dict[str, Any]) -> bool:
    """Return whether the first of a message's several parts was written by an agent, not by its user."""
    return has_several_texts(message) and _text(message["content"][0]).startswith(_REMINDER)


def _text(part: Any) -> str:
    return str(part.get("text", "")) if isinstance(part, dict) else ""


def with_last_text(message: dict[str, Any], text: str) -> dict[str, Any]:
    """Return a message that says *text* instead of its own, or of its last part if it has several."""
    if has_several_texts(message):
        *others, last = message["content"]
        return {**message, "content": [*others, {**last, "text": text}]}
    return {**message, "content": text}


def with_first_text_and(message: dict[str, Any], text: str) -> dict[str, Any]:
    """Return a message of several parts with *text* instead of all but the first of them."""
    return {**message, "content": [message["content"][0], {"type": "text", "text": text}]}


def with_messages(
    body: GenerationBody, messages: list[dict[str, Any]], *, generation_prompt: bool
) -> bytes:
    """Return a body that renders *messages* as the request would."""
    changed = {"messages": messages, "add_generation_prompt": generation_prompt}
    return msgspec.json.encode({**body.fields, **changed})


def leading_system(body: GenerationBody) -> list[dict[str, Any]]:
    """Return the system messages that the conversation begins with."""
    messages = body.messages
    n = next(
        (i for i, m in enumerate(messages) if m.get("role") not in SYSTEM_ROLES), len(messages)
    )
    return messages[:n]


def is_first_message(body: GenerationBody, index: int) -> bool:
    """Return whether nothing but system messages is before a message."""
    return index <= len(leading_system(body))


def last_user_index(body: GenerationBody) -> int | None:
    """Return the index of the newest user message, or None."""
    indices = (i for i, m in enumerate(body.messages) if m.get("role") == "user")
    return max(indices, default=None)


def rendering_key(body: GenerationBody, messages: list[dict[str, Any]]) -> bytes:
    """Return bytes that are equal for two bodies if *messages* are rendered alike in both."""
    fields = {k: body.fields[k] for k in RENDERING_FIELDS if k in body.fields}
    return msgspec.json.encode([fields, messages])
