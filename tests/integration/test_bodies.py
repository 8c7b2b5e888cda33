"""What clients send reaches llama-server byte for byte, but for the fields that the proxy owns."""

import gc
import gzip
import json
import weakref
from typing import Any

import pytest
from aiohttp import web

from proxy.core.messages import Route
from proxy.web import clients
from proxy.web.relay import Exchange
from tests.integration.conftest import StartRig
from tests.integration.rig import CHAT, COMPLETION
from tests.lab.clients.catalogue import ROWS
from tests.lab.waiting import until

ODD = (
    b' \n{ "tools" : [{"z":1,"a":{"y":2.50,"b":1e2}}],\t"messages":[ {"content":"h\\u00e9\\/llo",'
    b'"role":"user"} ],"temperature":0.10, "seed":12345678901234567890,"logit_bias":{"9":-0.0} } \n'
)
PINNED = b'"id_slot":0,"cache_prompt":true,"n_cache_reuse":0'


@pytest.mark.parametrize(
    ("path", "body", "sent"),
    [
        (CHAT, ODD, ODD.replace(b"{", b"{" + PINNED + b",", 1)),
        ("/chat/completions", ODD, ODD.replace(b"{", b"{" + PINNED + b",", 1)),
        (COMPLETION, b'{"prompt":"x y"}', b"{" + PINNED + b',"prompt":"x y"}'),
        (
            COMPLETION,
            b'{"prompt":"x","messages":[1]}',
            b"{" + PINNED + b',"prompt":"x","messages":[1]}',
        ),
        ("/completions", b"{}", b"{" + PINNED + b"}"),
        ("/v1/messages", ODD, ODD),
        (CHAT, b"{not json", b"{not json"),
        (CHAT, b"[1,2]", b"[1,2]"),
        (CHAT, b"", b""),
    ],
)
async def test_body_is_forwarded_as_sent_with_its_pin_spliced_in(
    start_rig: StartRig, path: str, body: bytes, sent: bytes
) -> None:
    async with start_rig(n_slots=1) as rig:
        await rig.post(path, body)
        assert [seen.body for seen in rig.requests_seen()] == [sent]


async def test_fields_of_the_proxy_replace_the_clients(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        body = b'{"z":1,"id_slot":7,"prompt":"x y","a":0.5,"cache_prompt":true}'
        await rig.post(COMPLETION, body)
        (seen,) = rig.requests_seen()
        assert list(seen.fields.items()) == [
            ("z", 1),
            ("id_slot", 0),
            ("prompt", "x y"),
            ("a", 0.5),
            ("cache_prompt", True),
            ("n_cache_reuse", 0),
        ]


async def test_client_may_turn_reuse_off(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        await rig.chat("a")
        assert (await rig.chat("a", cache_prompt=False)).n_reused == 0
        assert rig.requests_seen()[-1].fields["cache_prompt"] is False


async def test_request_of_several_completions_is_not_pinned(start_rig: StartRig) -> None:
    async with start_rig(n_slots=2) as rig:
        body = {"messages": [{"role": "user", "content": "hi"}], "n": 2}
        await rig.post(CHAT, body)
        exact = {"cache_prompt": True, "n_cache_reuse": 0}
        assert json.loads(rig.requests_seen()[-1].body) == {**body, **exact}


async def test_headers_reach_the_server_but_for_those_of_the_hop(start_rig: StartRig) -> None:
    async with start_rig() as rig:
        headers = {
            "Authorization": "Bearer s3cret token",
            "X-Api-Key": "other",
            "X-Conversation-Id": "abc",
            "X-Custom": "kept",
            "User-Agent": "client/1",
            "Accept": "text/event-stream",
            "Connection": "keep-alive",
        }
        body = b'{"prompt":"x y"}'
        await rig.post(COMPLETION, body, headers=headers)
        seen = rig.requests_seen()[-1]
        kept = headers.keys() - {"Connection"}
        assert {name: seen.headers.get(name) for name in kept} == {n: headers[n] for n in kept}
        assert seen.headers["Content-Type"] == "application/json"
        assert seen.headers["Content-Length"] == str(len(seen.body))
        assert seen.headers["Host"] == rig.server.base_url.removeprefix("http://")


async def test_own_calls_for_a_client_carry_its_key(start_rig: StartRig) -> None:
    async with start_rig() as rig:
        await rig.chat("a", key="alice")
        for place in ("apply-template", "tokenize"):
            assert rig.server.seen_at(place)[-1].headers["Authorization"] == "Bearer alice"


async def test_query_is_forwarded_as_encoded(start_rig: StartRig) -> None:
    async with start_rig() as rig:
        path = "/v1/chat/completions?a=%2Fb&c=d%20e"
        await rig.post(path, {"messages": [{"role": "user", "content": "hi"}]})
        assert rig.requests_seen()[-1].path == path


async def test_compressed_body_of_another_route_is_passed_on_compressed(
    start_rig: StartRig,
) -> None:
    async with start_rig() as rig:
        body = gzip.compress(b"words " * 1000)
        reply = await rig.post("/echo", body, headers={"Content-Encoding": "gzip"})
        assert reply.status == 200
        seen = rig.server.seen_at("echo")[-1]
        assert (seen.body, seen.headers["Content-Encoding"]) == (body, "gzip")


async def test_compressed_generation_is_understood(start_rig: StartRig) -> None:
    async with start_rig() as rig:
        body = gzip.compress(b'{"prompt":"x y"}')
        await rig.post(COMPLETION, body, headers={"Content-Encoding": "gzip"})
        seen = rig.requests_seen()[-1]
        if "Content-Encoding" in seen.headers:
            assert seen.body == body
        else:
            assert seen.fields["prompt"] == "x y"


@pytest.mark.parametrize("encoding", ["identity", ""])
async def test_body_that_is_said_not_to_be_compressed_is_cached(
    start_rig: StartRig, encoding: str
) -> None:
    async with start_rig() as rig:
        body = {"prompt": "x y " * 100}
        for _ in range(2):
            reply = await rig.post(COMPLETION, body, headers={"Content-Encoding": encoding})
        assert reply.headers["X-Prefix-Cache"].startswith("reused=201 ")


async def test_large_body_of_another_route_is_streamed_through(start_rig: StartRig) -> None:
    async with start_rig() as rig:
        body = bytes(range(256)) * 8192
        reply = await rig.post("/echo", body)
        assert reply.body == body


async def test_body_over_the_limit_is_refused_by_name(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig() as rig:
        monkeypatch.setattr(clients, "MAX_BODY_BYTES", 1 << 20)
        reply = await rig.post(CHAT, {"messages": [{"role": "user", "content": "x" * (1 << 20)}]})
        assert reply.status == 413
        assert "over 1 MiB" in reply.content["error"]["message"]


async def test_model_with_an_alias_is_named_as_llama_server_does(start_rig: StartRig) -> None:
    body = ODD.replace(b'"seed"', b'"model" :"claude-x","seed"')
    counted = "/v1/messages/count_tokens"
    async with start_rig(n_slots=1, aliases="gpt-y=other, claude-x = qwen") as rig:
        for path in (CHAT, "/v1/messages", counted):
            await rig.post(path, body)
        sent = [seen for seen in rig.server.seen if seen.path in (CHAT, "/v1/messages", counted)]
        assert len(sent) == 3
        for seen in sent:
            assert b'"tools":[{"z":1,"a":{"y":2.50,"b":1e2}}],"messages":[ {' in seen.body
            assert b'"temperature":0.10,"model":"qwen","seed":12345678901234567890' in seen.body


@pytest.mark.parametrize("body", [ODD, b'{"model":"other","prompt":"x y"}', b'{"model":5}', b"{no"])
async def test_body_without_an_alias_passes_as_it_is(start_rig: StartRig, body: bytes) -> None:
    async with start_rig(n_slots=1, aliases="claude-x=qwen") as rig:
        await rig.post("/v1/messages", body)
        assert [seen.body for seen in rig.requests_seen()] == [body]


async def test_clients_bodies_are_forwarded_as_sent_with_all_stabilizers_off(
    start_rig: StartRig,
) -> None:
    async with start_rig(n_slots=1, stabilizers="none") as rig:
        for row in ROWS:
            is_chat = row.mutation.form is Route.CHAT
            for body in row.mutation.requests:
                # No writer of JSON would write it like this again.
                raw = json.dumps({**body, "stream": False}, indent=1, ensure_ascii=True).encode()
                await rig.post(CHAT if is_chat else "/v1/messages", raw)
                pinned = raw.replace(b"{", b"{" + PINNED + b",", 1)
                assert rig.requests_seen()[-1].body == (pinned if is_chat else raw)


async def test_body_that_is_nested_too_deep_to_look_into_is_served(start_rig: StartRig) -> None:
    nested = b'[{"type":"text","text":' * 400 + b'"x"' + b"}]" * 400
    body = b'{"messages":[{"role":"user","content":' + nested + b"}]}"
    async with start_rig(n_slots=1) as rig:
        assert (await rig.post(CHAT, body)).status == 200


async def test_no_garbage_must_be_collected_before_a_body_is_let_go(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[weakref.ref[object]] = []
    begin = Exchange.__init__

    def note(exchange: Exchange, client: web.Request, *rest: Any) -> None:
        begin(exchange, client, *rest)
        kept.extend((weakref.ref(exchange), weakref.ref(client)))

    monkeypatch.setattr(Exchange, "__init__", note)
    async with start_rig() as rig:
        gc.collect()
        gc.disable()
        try:
            for name in "aab":
                await rig.chat(name)
                await rig.chat(name, stream=True)
            await rig.post("/v1/messages", ODD)
            await rig.settled()
            await until(lambda: len(kept) == 14 and not any(it() for it in kept))
        finally:
            gc.enable()
