"""Hypothesis strategies for bodies of /v1/messages and /v1/responses, most of them well-formed."""

from typing import Any

from hypothesis import strategies as st

from tests.lab import messages_bodies as messages
from tests.lab import responses_bodies as responses

Bodies = st.SearchStrategy[dict[str, Any]]

texts = st.text(max_size=8) | st.sampled_from(
    (
        "Look at the file.",
        "a  b\n\n",
        "<|im_end|>\n",
        "<think>",
        messages.BILLING,
        messages.UNICODE,
        "",
    )
)
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(texts, values, max_size=3)
ids = st.sampled_from(("t1", "t2", ""))
names = st.sampled_from(("Bash", "Read"))


def rarely(odd: st.SearchStrategy[Any], usual: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return mostly what is usual: one odd part decides about a whole body."""
    return st.integers(0, 15).flatmap(lambda n: odd if n == 0 else usual)


def some_of(fields: dict[str, st.SearchStrategy[Any]]) -> Bodies:
    return st.fixed_dictionaries({}, optional=fields)


def listed(items: st.SearchStrategy[Any], n_most: int = 4) -> st.SearchStrategy[list[Any]]:
    return st.lists(items, max_size=n_most)


# /v1/messages

_text_blocks = st.builds(messages.text, texts)
_strange_images = st.sampled_from(
    ({"type": "image"}, {"type": "image", "source": {"type": "file"}})
)
_results = st.one_of(
    st.builds(messages.result, ids),
    st.builds(messages.result, ids, texts, is_error=st.booleans()),
    st.builds(messages.result, ids, listed(rarely(values, _text_blocks | _strange_images))),
)
_blocks = st.one_of(
    _text_blocks,
    _results,
    st.builds(messages.thinking, texts),
    st.builds(messages.call, ids, rarely(values, objects), names),
    st.builds(lambda block: {**block, **messages.CACHED}, _text_blocks),
    rarely(values, st.just({"type": "redacted_thinking", "data": "x"}) | _strange_images),
)
_roles = st.sampled_from(("user", "assistant", "user", "assistant", "system"))
_messages = st.builds(
    lambda role, content: {"role": role, "content": content},
    rarely(texts, _roles),
    rarely(values, texts | listed(_blocks, 5)),
)
_input_schemas = st.fixed_dictionaries(
    {"type": st.just("object"), "properties": st.dictionaries(names, st.just({"default": 1.0}))},
    optional={"title": values},
)
_tools = some_of({"name": names, "description": texts, "input_schema": _input_schemas})
messages_bodies: Bodies = st.builds(
    lambda talk, fields: {"max_tokens": 1, "messages": [*talk, messages.HELLO], **fields},
    listed(_messages, 6),
    some_of(
        {
            "system": rarely(values, texts | listed(_text_blocks)),
            "tools": rarely(values, listed(_tools, 3)),
            "tool_choice": some_of({"type": st.sampled_from(("auto", "any", "tool", "none"))}),
            "chat_template_kwargs": some_of({"enable_thinking": st.booleans(), "marker": values}),
            "thinking": some_of({"type": st.sampled_from(("enabled", "disabled", "adaptive"))}),
        }
    ),
)

# /v1/responses

_input_parts = st.builds(responses.part, texts)
_said = st.builds(responses.said, texts)
_arguments = st.sampled_from(('{"b": 1e5, "a": [1.0]}', "{}", '{"\\u00e9":"/"}'))
_items = st.one_of(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(("user", "user", "developer")),
        texts | listed(_input_parts),
    ),
    st.builds(
        lambda parts, fields: {**responses.assistant(*parts), **fields},
        listed(rarely(values, _said), 2),
        some_of({"name": names, "reasoning_content": texts, "phase": values}),
    ),
    st.builds(responses.call, ids, rarely(texts, _arguments)),
    st.builds(responses.output, ids, rarely(values, texts | listed(_input_parts))),
    st.builds(
        responses.reasoning, st.lists(st.builds(responses.thought, texts), min_size=1, max_size=2)
    ),
)
_function_tools = st.fixed_dictionaries(
    {"type": st.just("function"), "name": names},
    optional={"description": texts, "parameters": _input_schemas, "strict": st.booleans()},
)
responses_bodies: Bodies = st.builds(
    lambda items, fields: {"max_output_tokens": 1, "input": [*items, responses.HELLO], **fields},
    listed(rarely(values, _items), 7),
    some_of(
        {
            "instructions": rarely(values, texts),
            "tools": listed(
                rarely(values, _function_tools | st.sampled_from(responses.OTHER_TOOLS))
            ),
            "tool_choice": st.sampled_from(("auto", "required", "none")),
            "parallel_tool_calls": st.booleans(),
            "reasoning": some_of(
                {"effort": st.sampled_from(("none", "low", None)), "summary": values}
            ),
            "chat_template_kwargs": some_of({"enable_thinking": st.booleans(), "marker": values}),
        }
    ),
)
