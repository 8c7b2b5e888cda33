"""API keys before a real llama-server: wrong ones touch nothing, and whose states are whose."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest

from proxy.llama.client import LlamaServer
from tests.lab.conversation import prose, system, tools, user
from tests.lab.raw_bytes import post, status_of
from tests.lab.rig import Rig
from tests.lab.router import Router, link_models
from tests.lab.server import request
from tests.lab.swap import Swap
from tests.lab.wrong_keys import REFUSED, SHAPES, bearer, send
from tests.live.conftest import StartRig
from tests.live.test_commands import asked, command

CHAT = "/v1/chat/completions"
KEYED: dict[str, Any] = {"extra_args": ("--api-key", "own,ann,bob"), "upstream_api_key": "own"}
"""Options of a rig whose llama-server asks for a key."""
TOOLS = tools(2)
HEADER = [system(200)]


def slots(rig: Rig) -> Any:
    """Return what llama-server says that its slots hold, and who was last there."""
    said = request(rig.server.base_url, "GET", "/slots", headers=bearer("own"))[1]
    return [(slot.get("id_task"), slot.get("n_prompt_tokens")) for slot in said]


def files(rig: Rig) -> dict[str, int]:
    """Return the state files by name, with when they were written."""
    folder = Path(rig.settings.slot_save_path)
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("lpc-*")}


async def ask(
    rig: Rig, messages: list[Any], key: str | None = None, **fields: Any
) -> dict[str, Any]:
    body = {"messages": messages, "tools": TOOLS, "max_tokens": 4, "temperature": 0} | fields
    return await rig.post(CHAT, body, headers=bearer(key) if key else {})


async def reused(rig: Rig, messages: list[Any], key: str | None = None) -> int:
    """Return how many tokens a request found, without those evaluated for it just before."""
    await ask(rig, messages, key)
    return int((await explained(rig))["confirmed"])


async def explained(rig: Rig) -> dict[str, Any]:
    return dict((await asked("explain", "--admin", rig.admin_url))["request"])


async def test_who_has_no_right_key_touches_nothing(start_rig: StartRig) -> None:
    async with start_rig("hybrid", **KEYED) as rig:
        messages = [*HEADER, user(1)]
        await ask(rig, messages, "ann")
        await ask(rig, [system(180, seed=5), user(2)], "ann")
        await rig.settled()
        before = slots(rig), files(rig)
        for key, name in itertools.product(("guess", None), SHAPES):
            status, body = await send(rig.client, rig.base_url, SHAPES[name], key)
            assert (status, name) == (401, name), body
            assert json.loads(body)["error"]["type"] == "authentication_error", name
        await rig.settled()
        assert (slots(rig), files(rig)) == before
        reply = await ask(rig, messages, "ann")
        assert reply["timings"]["prompt_n"] < 10


async def test_what_llama_server_cannot_read_touches_nothing(start_rig: StartRig) -> None:
    async with start_rig("hybrid", **KEYED) as rig:
        await ask(rig, [*HEADER, user(1)], "ann")
        await rig.settled()
        before = slots(rig), files(rig)
        for name in REFUSED:
            status, _ = await send(rig.client, rig.base_url, SHAPES[name], "bob")
            assert 400 <= status < 600, name
        await rig.settled()
        assert (slots(rig), files(rig)) == before
        # What it cannot do is known once it has said so.
        await send(rig.client, rig.base_url, SHAPES["embeddings"], "bob")
        await ask(rig, [*HEADER, user(1)], "ann")
        await rig.settled()
        before = slots(rig), files(rig)
        assert (await send(rig.client, rig.base_url, SHAPES["embeddings"], "bob"))[0] == 501
        await rig.settled()
        assert (slots(rig), files(rig)) == before


PARSED_BY_LLAMA_SERVER_ONLY = {
    "byte order mark": b"\xef\xbb\xbf%s",
    "zero byte": b"%s\0{",
    "deep": b'{"x":' + b"[" * 5000 + b"]" * 5000 + b",%b",
}


async def test_body_that_only_llama_server_s_parser_takes_has_a_lease(start_rig: StartRig) -> None:
    """Where it ran is known afterwards, so the slot that it took is not taken for anybody's."""
    body = json.dumps({"prompt": "a b c", "n_predict": 2, "stream": True}).encode()
    async with start_rig("full", **KEYED) as rig:
        messages = [*HEADER, user(1)]
        first = await ask(rig, messages, "ann")
        for name, raw in PARSED_BY_LLAMA_SERVER_ONLY.items():
            sent = raw % (body if b"%s" in raw else body[1:])
            url, headers = rig.base_url + "/completion", bearer("bob")
            async with rig.client.post(url, data=sent, headers=headers) as reply:
                assert reply.status == 200, name
                await reply.read()
            await rig.settled()
            held = slots(rig)
            process = rig.running.server.process
            assert process is not None
            for slot in process.slots:
                n_known = getattr(slot.content, "n_tokens", None)
                assert n_known is None or abs(n_known - (held[slot.id][1] or 0)) <= 4, (name, slot)
            again = await ask(rig, messages, "ann")
            assert again["timings"]["cache_n"] > first["usage"]["prompt_tokens"] - 20, name


async def test_warmed_header_is_there_for_a_client_with_any_key(
    start_rig: StartRig, tmp_path: Path
) -> None:
    """As quickstart.md says: llama-server asks for no key, `warm` sends none, and clients send "none"."""
    body = {"messages": [*HEADER, user(1)], "tools": TOOLS}
    (tmp_path / "first-request.json").write_text(json.dumps(body))
    async with start_rig("hybrid") as rig:
        warm = ("warm", "--pin", tmp_path / "first-request.json", "--admin", rig.admin_url)
        warmed = await asked(*warm)

        async with openai.AsyncOpenAI(base_url=rig.base_url + "/v1", api_key="none") as client:
            asking: Any = {"messages": [*HEADER, user(7)], "tools": TOOLS, "max_tokens": 4}
            usage = (await client.chat.completions.create(model="any", **asking)).usage
        assert usage.prompt_tokens_details.cached_tokens >= warmed["n_header_tokens"] - 5 > 1000
        assert (await rig.health())["reasons"] == []


async def test_warm_needs_the_clients_key_where_llama_server_asks_for_one(
    start_rig: StartRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"messages": [*HEADER, user(1)], "tools": TOOLS}
    (tmp_path / "first-request.json").write_text(json.dumps(body))
    async with start_rig("hybrid", **KEYED) as rig:
        warm = ("warm", tmp_path / "first-request.json", "--admin", rig.admin_url)
        status, output = await command(*warm)
        assert status == 1 and "an API key is needed" in output
        status, output = await command(*warm, "--api-key", "guess")
        assert status == 1 and "this API key is refused" in output
        monkeypatch.setenv("LLAMA_API_KEY", "ann")
        warmed = await asked(*warm)
        reply = await ask(rig, [*HEADER, user(7)], "ann")
        assert reply["timings"]["cache_n"] >= warmed["n_header_tokens"] - 5
        assert (await explained(rig))["cause"] in ("hit", "first sight")
        # Bob is told nothing of it; the operator is.
        reply = await ask(rig, [*HEADER, user(8)], "bob")
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert "API key" not in json.dumps(reply)
        record = await explained(rig)
        assert record["confirmed"] == 0 and record["n_missed"] > 1000
        assert record["cause"] == "known under another API key"
        assert (await rig.health())["reasons"][0]["kind"] == "several API keys"
        await ask(rig, [*HEADER, user(9)], "bob", cache={"no_read": True})
        assert (await explained(rig))["cause"] == "not looked up"  # whoever has it


async def test_states_of_keys_that_were_asked_for_stay_theirs(start_rig: StartRig) -> None:
    messages = [*HEADER, user(1)]
    async with start_rig("hybrid", **KEYED) as rig:
        await ask(rig, messages, "ann")
        await rig.settled()
        keyed = rig.server.extra_args
        rig.server.extra_args = ()
        await rig.restart()
        # Nobody is asked any more, but Ann has not said that everybody may have what is hers.
        assert await reused(rig, messages, "ann") == 0
        assert (await explained(rig))["cause"] == "known under another API key"
        await rig.settled()
        rig.server.extra_args = keyed
        await rig.restart()
        assert await reused(rig, messages, "ann") > 1000
        # What was everybody's is now of nobody whom llama-server lets in.
        assert await reused(rig, messages, "bob") == 0
        rig.settings = msgspec.structs.replace(rig.settings, share_between_api_keys=True)
        await rig.restart()
        # Shared is what was kept while nobody was asked.
        assert await reused(rig, messages, "bob") > 1000


ROUTES: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "chat": (CHAT, lambda text: {"messages": [{"role": "user", "content": text}]}),
    "completions": ("/v1/completions", lambda text: {"prompt": text}),
    "completion": ("/completion", lambda text: {"prompt": text}),
    "token ids": ("/completion", lambda text: {"prompt": [200 + len(w) for w in text.split()]}),
    "messages": ("/v1/messages", lambda text: {"messages": [{"role": "user", "content": text}]}),
    "responses": ("/v1/responses", lambda text: {"input": text}),
}


Who = Callable[[str], tuple[str | None, dict[str, str]]]
"""What somebody sends with a request: a key, and fields of the body."""


async def test_nobody_gets_anything_of_another_by_a_form(start_rig: StartRig) -> None:
    """llama-server makes JSON of the texts in a form, on every route; the grammar ends the answer."""
    async with start_rig("hybrid", **KEYED) as rig:
        for seed, path in enumerate(("/completion", "/v1/completions")):
            text = prose(seed, 300)
            await rig.post(path, {"prompt": text, "n_predict": 1}, headers=bearer("ann"))
            form = aiohttp.FormData({"grammar": 'root ::= "a"'}, default_to_multipart=True)
            form.add_field("prompt", text)
            url, headers = rig.base_url + path, bearer("bob")
            async with rig.client.post(url, data=form, headers=headers) as reply:
                answer = await reply.json()
            assert reply.status == 200, answer
            assert answer["timings"]["cache_n"] == 0, path


def form(**texts: str) -> bytes:
    """Return a form with the boundary X."""
    named = "--X\r\nContent-Disposition: form-data; name={}\r\n\r\n{}\r\n"
    return "".join([*itertools.starmap(named.format, texts.items()), "--X--\r\n"]).encode()


def for_model_a(text: str) -> bytes:
    return json.dumps({"model": "a", "prompt": text, "n_predict": 1}).encode()


FORM, END = {"Content-Type": "multipart/form-data; boundary=X"}, 'root ::= "a"'
FOR_B = 'name="model"\r\n\r\nb\r\n'
UNREADABLE: dict[str, tuple[dict[str, str], Callable[[str], bytes]]] = {
    "deep": ({}, lambda text: PARSED_BY_LLAMA_SERVER_ONLY["deep"] % for_model_a(text)[1:]),
    "encoded": ({"Content-Encoding": "x"}, for_model_a),
    "form": (FORM, lambda text: form(model="a", prompt=text, grammar=END)),
    "form for b": (FORM, lambda text: form(x=FOR_B, model="a", prompt=text, grammar=END)),
}
"""Bodies for the model a, in which the proxy does not see that."""


async def test_body_whose_model_cannot_be_read_gets_nothing_of_another_at_a_router(
    tmp_path: Path, directory: Path
) -> None:
    models = link_models(tmp_path / "models", {"a": "full", "b": "full"})
    options: dict[str, Any] = {"models_max": 2, "n_ctx": 8192, "log_path": tmp_path / "router.log"}
    router = Router(models, directory, extra_args=KEYED["extra_args"], **options)
    async with Rig(router, directory, upstream_api_key="own") as rig:
        url = rig.base_url + "/completion"
        for seed, (name, (headers, body)) in enumerate(UNREADABLE.items()):
            for model, text in (("a", prose(seed, 100)), ("b", "a b c")):
                fields = {"model": model, "prompt": text, "n_predict": 1}
                await rig.post("/completion", fields, headers=bearer("ann"))
            data, headers = body(prose(seed, 100)), headers | bearer("bob")
            async with rig.client.post(url, data=data, headers=headers) as reply:
                assert (name, reply.status) == (name, 400), await reply.text()


TWO_NAMES = {
    "keys": ("", "application/json", b'{"model":"a",%b,"model":"b"}'),
    "a mark and keys": ("", "application/json", b'\xef\xbb\xbf{"model":"a",%b,"model":"b"}'),
    "the query": ("?model=a", "text/plain", b'{%b,"model":"b"}'),
    "the query alone": ("?model=a", "text/plain", b"{%b}"),
}
"""Where llama-swap finds the model a, and llama-server would find b."""


async def test_request_of_two_names_gets_nothing_of_another_at_llama_swap(
    tmp_path: Path, directory: Path
) -> None:
    both = {"both": {"swap": False, "members": ["a", "b"]}}
    keys: dict[str, Any] = {"groups": both, "apiKeys": ["own", "ann", "bob"]}
    swap = Swap(tmp_path, {"a": "full", "b": "full"}, directory, n_slots=1, n_ctx=8192, **keys)
    async with Rig(swap, directory, upstream_api_key="own") as rig:
        for model in ("a", "b"):  # then it is known that both may be loaded
            await rig.post(
                "/completion",
                {"model": model, "prompt": "a", "n_predict": 1},
                headers=bearer("ann"),
            )
        for seed, (name, (query, kind, body)) in enumerate(TWO_NAMES.items()):
            for model, text in (("a", prose(seed, 100)), ("b", "a b c")):
                fields = {"model": model, "prompt": text, "n_predict": 1}
                await rig.post("/completion", fields, headers=bearer("ann"))
            fields = {"prompt": prose(seed, 100), "n_predict": 1}
            url, data = (
                f"{rig.base_url}/completion{query}",
                body % json.dumps(fields)[1:-1].encode(),
            )
            headers = {**bearer("bob"), "Content-Type": kind}
            async with rig.client.post(url, data=data, headers=headers) as reply:
                answer = await reply.json()
            assert answer.get("timings", {"cache_n": 0})["cache_n"] < 9, name


async def test_nobody_s_prompt_is_read_sooner_for_what_another_has_sent(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text too long for the context costs its sender nothing but this time."""
    call, calls = LlamaServer.call, list[tuple[str, int]]()

    async def counted(*given: Any, **options: Any) -> Any:
        if (path := given[2]) in ("/tokenize", "/apply-template"):
            calls.append((path, len(repr(given[4]))))
        return await call(*given, **options)

    async def read(rig: Rig, key: str, digit: int) -> list[tuple[str, int]]:
        await rig.settled()
        calls.clear()
        roles = "system", "user", "assistant", "user"
        messages = [{"role": role, "content": f"{digit} " * 300} for role in roles]
        await ask(rig, messages, key, tools=tools(1))
        await rig.settled()
        return sorted(calls)

    monkeypatch.setattr(LlamaServer, "call", counted)
    async with start_rig("hybrid", **KEYED) as rig:
        for key, digit in (("ann", 1), ("bob", 2)):  # what is learned of the template
            await read(rig, key, digit)
        first, again = await read(rig, "ann", 3), await read(rig, "ann", 3)
        assert sum(size for _, size in again) < sum(size for _, size in first)
        assert await read(rig, "bob", 3) == await read(rig, "bob", 4)


async def test_key_that_is_not_passed_on_gets_nothing_of_another(start_rig: StartRig) -> None:
    """The proxy would ask about one key, and llama-server would take the other."""
    two = "Authorization: Bearer guess", "Connection: Authorization", "X-Api-Key: bob"
    async with start_rig("hybrid", **KEYED) as rig:
        prompt = json.dumps({"prompt": prose(1, 300), "n_predict": 1}).encode()
        async with rig.client.post(
            rig.base_url + "/completion", data=prompt, headers=bearer("ann")
        ) as reply:
            assert reply.status == 200
        before = slots(rig)
        raw = post(b"/completion", prompt, "".join(f"{line}\r\n" for line in two).encode())
        assert await status_of(rig.base_url, raw) == 400
        assert slots(rig) == before


@pytest.mark.parametrize(
    ("options", "who"),
    [
        (KEYED, lambda name: (name, {})),
        ({}, lambda name: (None, {"cache_salt": name})),
        (KEYED, lambda name: ("ann", {"cache_salt": name})),
    ],
    ids=["keys", "salts", "salts of one key"],
)
async def test_nobody_gets_anything_of_another_on_any_route_before_and_after_a_restart(
    start_rig: StartRig, options: dict[str, Any], who: Who
) -> None:
    async with start_rig("hybrid", **options) as rig:

        async def reuse(name: str, person: str, seed: int) -> int:
            path, fields = ROUTES[name]
            key, salt = who(person)
            text = prose(1000 * [*ROUTES].index(name) + seed, 150)
            body = json.dumps({**fields(text), "max_tokens": 2, **salt}).encode()
            status, answer = await send(rig.client, rig.base_url, (path, body), key)
            assert status == 200, answer
            await rig.settled()
            return int((await explained(rig))["confirmed"] or 0)

        for name in ROUTES:
            assert [await reuse(name, "ann", seed) < 40 for seed in (1, 2)] == [True, True], name
            assert await reuse(name, "bob", 1) == 0, name
            assert await reuse(name, "ann", 1) > 100, name
        await rig.settled()
        await rig.restart()
        for name in ROUTES:
            assert await reuse(name, "bob", 2) < 40, name
            assert await reuse(name, "ann", 2) > 100, name
