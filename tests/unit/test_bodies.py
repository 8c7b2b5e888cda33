"""Clients' bodies: what is read of them, and how they are pinned without changing the rest."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.messages import Route, n_leading_system
from proxy.core.model import SlotId
from proxy.llama.requests import (
    GenerationBody,
    beside_tokens,
    cache_wishes,
    chat_form,
    conversation_of,
    is_too_deep,
    n_completions,
    only_to_warm,
    parse_body,
    pin,
)
from proxy.serving.prompts import with_messages

SLOT = SlotId(3)
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def body(raw: bytes | dict[str, Any]) -> GenerationBody:
    parsed = parse_body(json.dumps(raw).encode() if isinstance(raw, dict) else raw)
    assert parsed is not None
    return parsed


# Parsing.


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[1]",
        b'"text"',
        b'{"a": 1',
        b'{"a": 1} x',
        b'{"a": 1,}',
        b"\0{}",
        b'{"a": NaN}',
        b'{"a": "\\ud800"}',
        b'{"a": "\xff"}',
        b'{"\xff": 1}',
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=lambda raw: repr(raw[:12]),
)
def test_parse_body_of_what_is_no_json_object_is_none(raw: bytes) -> None:
    assert parse_body(raw) is None


@given(st.binary())
def test_parse_body_of_any_bytes_raises_nothing(raw: bytes) -> None:
    parse_body(b'{"' + raw + b'": 1}')
    parse_body(raw)


def test_parse_body_of_a_repeated_key_keeps_the_last() -> None:
    assert body(b'{"n": 1, "n": 2}').fields == {"n": 2}


# Pinning.


def test_pin_of_a_body_without_owned_fields_splices_and_touches_nothing_else() -> None:
    raw = b' \n\t{ "zeta":1e0,\t"tools" : [{"b":1, "a":2}], "x": "\\u00e9" }\n'
    assert pin(body(raw), SLOT) == (
        b' \n\t{"id_slot":3,"cache_prompt":true,"n_cache_reuse":0,'
        b' "zeta":1e0,\t"tools" : [{"b":1, "a":2}], "x": "\\u00e9" }\n'
    )


@pytest.mark.parametrize("raw", [b"{}", b"{ }", b" {\n}"])
def test_pin_of_an_empty_object_is_valid_json(raw: bytes) -> None:
    owned = {"id_slot": 3, "cache_prompt": True, "n_cache_reuse": 0}
    assert json.loads(pin(body(raw), SLOT)) == owned


def test_pin_replaces_the_clients_slot_in_place() -> None:
    pinned = pin(body(b'{"a": 1, "id_slot": 0, "b": {"d": 1, "c": 2}}'), SLOT)
    assert list(json.loads(pinned).items()) == [
        ("a", 1),
        ("id_slot", 3),
        ("b", {"d": 1, "c": 2}),
        ("cache_prompt", True),
        ("n_cache_reuse", 0),
    ]
    assert pinned.index(b'"d"') < pinned.index(b'"c"')


def test_pin_of_a_repeated_slot_leaves_the_proxys_only() -> None:
    assert pin(body(b'{"id_slot": 1, "id_slot": 2}'), SLOT).count(b'"id_slot"') == 1


@pytest.mark.parametrize(
    ("sent", "reuses", "pinned"),
    [
        (False, True, False),
        (True, True, True),
        (None, True, True),
        (True, False, False),
        (False, False, False),
    ],
)
def test_pin_honours_that_a_client_turned_reuse_off(
    sent: bool | None, reuses: bool, pinned: bool
) -> None:
    raw = {"cache_prompt": sent, "prompt": "x"}
    assert json.loads(pin(body(raw), SLOT, reuses=reuses))["cache_prompt"] is pinned


@pytest.mark.parametrize(("sent", "pinned"), [(8, 8), (0, 0), (None, 0)])
def test_pin_keeps_states_from_being_shifted_unless_the_client_asks_for_it(
    sent: int | None, pinned: int
) -> None:
    shifted = body({"n_cache_reuse": sent})
    assert json.loads(pin(shifted, SLOT))["n_cache_reuse"] == pinned
    assert bool(beside_tokens(Route.COMPLETION, shifted)) is (pinned > 0)
    assert json.loads(pin(shifted, SLOT, may_shift=True)).get("n_cache_reuse") == sent


def test_pin_without_reuse_turns_it_off() -> None:
    assert json.loads(pin(body(b'{"a":1}'), SLOT, reuses=False))["cache_prompt"] is False


def test_pin_that_encodes_again_keeps_numbers_beyond_64_bits() -> None:
    pinned = pin(body(b'{"id_slot": 0, "seed": 123456789012345678901234567890}'), SLOT)
    assert json.loads(pinned)["seed"] == 123456789012345678901234567890


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=6,
)
FIELDS = st.dictionaries(st.sampled_from(["a", "b", "id_slot", "cache_prompt", "n"]), JSON_VALUES)


@given(FIELDS, st.sampled_from([None, 1]), st.sampled_from([b"", b" ", b"\r\n\t"]))
def test_pin_of_any_body_changes_only_the_owned_fields(
    fields: dict[str, Any], indent: int | None, space: bytes
) -> None:
    raw = space + json.dumps(fields, indent=indent).encode() + space
    pinned = pin(body(raw), SLOT)
    asked = fields.get("cache_prompt")
    reuses = asked is not False if isinstance(asked, bool | None) else asked
    owned = {"id_slot": 3, "cache_prompt": reuses, "n_cache_reuse": 0}
    assert json.loads(pinned) == {**fields, **owned}
    assert [k for k in json.loads(pinned) if k not in owned] == [
        k for k in fields if k not in owned
    ]
    if not owned.keys() & fields.keys():
        brace = raw.index(b"{") + 1
        assert pinned.startswith(raw[:brace]) and pinned.endswith(raw[brace:])


# Why a prompt is not looked up.


@pytest.mark.parametrize("route", [Route.PINNED, Route.UNPINNED])
def test_bypass_reason_of_a_route_whose_prompt_is_not_read_names_it(route: Route) -> None:
    assert chat_form(route, body(CHAT))[1] == f"{route} route"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"n": 1, "lora": [], "n_cache_reuse": 0, "cache_prompt": True}, None),
        ({"n": 2}, "several completions"),
        ({"n_cmpl": 3}, "several completions"),
        ({"n": 4, "n_cmpl": None}, "several completions"),
        ({"lora": [{"id": 0, "scale": 1.0}]}, "lora in the request"),
        ({"n_cache_reuse": 256}, "n_cache_reuse in the request"),
        ({"cache_prompt": False}, "cache_prompt is false"),
        ({"messages": []}, "no messages"),
        ({"messages": "hi"}, "no messages"),
        ({"messages": ["hi"]}, "malformed messages"),
        ({"messages": [{"content": [{"type": "text", "text": "x"}]}]}, None),
        ({"messages": [{"role": "assistant", "content": None}]}, None),
        ({"messages": [{"content": [{"type": "image_url"}]}]}, None),
        ({"messages": [{"content": [{"type": "video_url"}]}]}, "media in the request"),
        ({"messages": [{"content": ["x"]}]}, "media in the request"),
    ],
)
def test_bypass_reason_of_a_chat_is_named(changes: dict[str, Any], reason: str | None) -> None:
    chat = body({**CHAT, **changes})
    found, why = chat_form(Route.CHAT, chat)
    assert why == reason
    if reason is None:
        has_media = "image_url" in str(changes)
        assert found == GenerationBody(chat.raw, chat.fields, has_media)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("text", None),
        ([1, 2, 3], None),
        ([1, "text", 2], None),
        (["one"], None),
        ([[1, 2]], None),
        ("", "no prompt"),
        ([], "no prompt"),
        ([""], "no prompt"),
        ([["one"]], "no prompt"),
        (None, "no prompt"),
        ({"prompt_string": "x", "multimodal_data": []}, "no prompt"),
        ([True], "no prompt"),
        (["one", "two"], "several completions"),
        ([[1, 2], [3]], "several completions"),
        ([1, [2]], "several completions"),
    ],
)
def test_bypass_reason_of_a_prompt_is_named(prompt: Any, reason: str | None) -> None:
    assert chat_form(Route.COMPLETION, body({"prompt": prompt}))[1] == reason


def test_bypass_reason_of_an_unreadable_body_is_named() -> None:
    assert chat_form(Route.CHAT, None) == (None, "body is not a JSON object")


@pytest.mark.parametrize(
    ("fields", "n"),
    [
        *[({}, 1), ({"n": 0}, 1), ({"n": 3}, 3), ({"n": "3"}, 1), ({"n": 2, "n_cmpl": 4}, 4)],
        *[({"prompt": ["a", "b"]}, 2), ({"prompt": [[1], [2]], "n": 2}, 4), ({"prompt": []}, 1)],
    ],
)
def test_n_completions_counts_slots(fields: dict[str, Any], n: int) -> None:
    assert n_completions(Route.COMPLETION, body(fields)) == n


TALK = body(
    {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "developer", "content": "d"},
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "v"},
            {"role": "tool", "content": "t"},
        ],
        "tools": [{"b": 1, "a": 2}],
        "temperature": 0.5,
    }
)


def test_leading_system_ends_at_the_first_other_role() -> None:
    assert n_leading_system(TALK.messages) == 2
    assert n_leading_system(CHAT["messages"]) == 0


def test_with_messages_keeps_the_other_fields_in_order() -> None:
    rendered = with_messages(TALK, [{"role": "user"}])
    assert json.loads(rendered) == {
        **TALK.fields,
        "messages": [{"role": "user"}],
        "add_generation_prompt": False,
    }
    assert rendered.index(b'"b"') < rendered.index(b'"a"')


def test_messages_that_are_encoded_already_give_the_same_conversation() -> None:
    encoded = [msgspec.json.encode(message) for message in TALK.messages]
    assert conversation_of(TALK, encoded) == conversation_of(TALK)


def test_one_text_in_a_list_and_the_text_itself_are_the_same_message() -> None:
    """Claude Code sends its newest text as a list, and the same text as a string in the next request."""
    part = {"type": "text", "text": "hi"}
    contents = [
        "hi",
        [part],
        [part, part],
        [{**part, "other": 1}],
        [{"type": "text", "text": "ho"}],
    ]
    bodies = [GenerationBody(b"", {"messages": [{"role": "user", "content": c}]}) for c in contents]
    encoded = [[msgspec.json.encode(message) for message in each.messages] for each in bodies]
    digests = [conversation_of(*both).digests for both in zip(bodies, encoded, strict=True)]
    assert digests == [conversation_of(each).digests for each in bodies]
    assert digests[0] == digests[1] and len(set(digests)) == 4


def test_digests_depend_on_what_the_template_reads_only() -> None:
    cooler = GenerationBody(b"", {**TALK.fields, "temperature": 0.1})
    other_order = GenerationBody(b"", {**TALK.fields, "tools": [{"a": 2, "b": 1}]})
    shorter = GenerationBody(b"", {**TALK.fields, "messages": TALK.messages[:2]})
    assert conversation_of(TALK) == conversation_of(cooler)
    assert conversation_of(TALK).digests[:8] != conversation_of(other_order).digests[:8]
    assert conversation_of(TALK).n_behind(conversation_of(shorter).digests) > 0


def test_shape_is_shared_by_requests_of_one_kind_and_holds_no_text() -> None:
    one = body({**CHAT, "model": "m"}).shape("/v1/chat/completions")
    two = body({"model": "n", "messages": [{"role": "user", "content": "other"}]})
    assert one == two.shape("/v1/chat/completions") == "/v1/chat/completions user messages,model"


@pytest.mark.parametrize(
    ("cache", "header", "expected"),
    [
        (None, "", set()),
        ({"no_store": True, "no_read": False}, "", {"no_store"}),
        ({"no-store": True, "no-cache": True, "ttl": 5}, "", {"no_store", "no_read"}),
        (None, "no-read, No-Store", {"no_store", "no_read"}),
        ("no_store", "no-cache", {"no_read"}),
    ],
)
def test_wishes_are_read_from_the_body_and_from_the_header(
    cache: Any, header: str, expected: set[str]
) -> None:
    body = GenerationBody(b"", {"cache": cache})
    assert cache_wishes(body, header) == expected
    assert cache_wishes(None, header) <= cache_wishes(body, header)


@pytest.mark.parametrize(
    ("route", "fields", "warms"),
    [
        (Route.MESSAGES, {"max_tokens": 0, "stream": True}, True),
        (Route.MESSAGES, {"max_tokens": 1}, False),
        (Route.CHAT, {"max_tokens": 0}, False),
        (Route.RESPONSES, {"prompt_cache_options": {"prewarm": True}}, True),
        (Route.RESPONSES, {"prompt_cache_options": {"prewarm": "yes"}}, False),
    ],
)
def test_request_that_only_warms_is_known_by_what_it_says(
    route: Route, fields: Any, warms: bool
) -> None:
    raw = only_to_warm(route, GenerationBody(b"", fields))
    limits = {"max_tokens": 1, "max_output_tokens": 1, "n_predict": 1}
    assert (raw and json.loads(raw)) == (fields | limits if warms else None)


def test_body_that_is_parsed_can_be_written_further_down_the_stack() -> None:
    def written(fields: object, n_calls: int) -> bytes:
        return written(fields, n_calls - 1) if n_calls else msgspec.json.encode(fields)

    def nested(depth: int) -> bytes:
        return b'{"a":' * depth + b"1" + b"}" * depth

    depth = next(n for n in range(1000, 0, -1) if parse_body(nested(n)))
    deepest = parse_body(nested(depth))
    assert deepest and written(deepest.fields, 60) == nested(depth)
    assert is_too_deep(nested(depth + 2))
