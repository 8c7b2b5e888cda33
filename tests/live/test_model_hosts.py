"""Several models behind one address, each with the proxy's cache: llama-server's router, and llama-swap."""

import asyncio
import json
import os
import shlex
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from structlog.testing import capture_logs

from proxy.core.slots import Slot
from proxy.core.tokens import TokenIds, common_prefix_length, token_ids
from proxy.servers import addresses
from tests.lab.conversation import Message, agent_requests, system, tools
from tests.lab.models import least_model
from tests.lab.processes import await_end, child_pids
from tests.lab.rig import Rig
from tests.lab.router import Router, link_models
from tests.lab.server import LlamaServer, find_free_port
from tests.lab.swap import Swap
from tests.lab.waiting import HANG_SECONDS, until

KINDS = ("full", "hybrid")
SLACK_TOKENS = 32
CANARY_TOKENS = 128
LONG_CTX = 131_072
"""Where an answer goes on while others are loaded."""
TOOLS = tools(3)
HEADER = [system(150)]
CHAT = "/v1/chat/completions"

Host = Router | Swap


class Models:
    """A rig before a host of one model of each kind, which are called as their kinds are."""

    def __init__(self, rig: Rig[Host], host: Host) -> None:
        self.rig = rig
        self.host = host
        self.sequences: dict[str, list[TokenIds]] = {}

    async def ask(self, model: str, messages: list[Message], **fields: Any) -> dict[str, Any]:
        return await self.rig.chat(messages, model=model, tools=TOOLS, **fields)

    async def measure_all(self) -> None:
        """Have each model loaded once, so that its rule is known."""
        for model in KINDS:
            await self.ask(model, [{"role": "user", "content": "hello"}], max_tokens=1)
            await self.rig.reasons_are()

    async def attached(self, names: set[str]) -> None:
        """Return once /health names exactly these models as attached."""

        async def are_attached() -> bool:
            return {server["name"] for server in (await self.rig.health())["servers"]} == names

        await until(are_attached)

    async def n_new(self, model: str, messages: list[Message]) -> int:
        """Return how many tokens of a prompt no earlier one of the model began with."""
        rendered = await self._post(
            model, "/apply-template", {"messages": messages, "tools": TOOLS}
        )
        content = {"content": rendered["prompt"], "add_special": True, "parse_special": True}
        tokens = token_ids((await self._post(model, "/tokenize", content))["tokens"])
        seen = self.sequences.setdefault(model, [])
        n_known = max((common_prefix_length(tokens, s) for s in seen), default=0)
        seen.append(tokens)
        return len(tokens) - n_known

    async def _post(self, model: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Post what is no generation, in the host's own way to name a model."""
        if isinstance(self.host, Router):
            return await self.rig.post(path, {"model": model, **body})
        return await self.rig.post(f"/upstream/{model}{path}", body)

    async def last_request(self) -> dict[str, Any]:
        async with self.rig.client.get(self.rig.admin_url + "/requests?limit=1") as reply:
            record: dict[str, Any] = (await reply.json())["requests"][0]
            return record

    @asynccontextmanager
    async def answering(
        self, model: str, messages: list[Message]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield a long answer that has begun."""
        body = {"model": model, "messages": messages, "tools": TOOLS, "stream": True}
        body |= {"max_tokens": 100_000, "ignore_eos": True}
        async with self.rig.client.post(self.rig.base_url + CHAT, json=body) as reply:
            await reply.content.readany()
            yield reply

    async def ask_host(self, model: str, messages: list[Message]) -> dict[str, Any]:
        """Return the message that a model answers without the proxy, once its host has loaded it."""
        body = {
            "model": model,
            "messages": messages,
            "tools": TOOLS,
            "max_tokens": 4,
            "temperature": 0,
        }
        reply: dict[str, Any] = {}

        async def is_answered() -> bool:
            nonlocal reply
            _, reply = await asyncio.to_thread(self.host.request, "POST", CHAT, body)
            return "choices" in reply

        await until(is_answered)
        message: dict[str, Any] = reply["choices"][0]["message"]
        return message

    async def refusal(self, model: str, path: str, base_url: str | None = None) -> tuple[int, str]:
        """Return how a request for a model that is not there is refused."""
        body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
        async with self.rig.client.post((base_url or self.rig.base_url) + path, json=body) as reply:
            return reply.status, await reply.text()

    async def unload(self, model: str) -> None:
        """Have a client unload a model, and wait until it is."""
        if isinstance(self.host, Router):
            await self.rig.post("/models/unload", {"model": model})
        else:
            async with self.rig.client.post(
                f"{self.rig.base_url}/api/models/unload/{model}"
            ) as reply:
                assert reply.status == 200
        await until(lambda: model not in self.loaded())

    def kill(self, model: str) -> None:
        """Kill the process of a model."""
        port = self.host.child_url(model).rpartition(":")[2]
        for pid in child_pids(self.host.pid):
            if f"--port\0{port}\0" in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)

    async def warm(self, model: str, messages: list[Message]) -> str:
        """Have a header kept; return what the admin listener says of it."""
        body = {"model": model, "messages": messages, "tools": TOOLS}
        async with self.rig.client.post(self.rig.admin_url + "/warm", json=body) as reply:
            return await reply.text()

    def slots(self) -> Iterator[Slot]:
        """Yield the slots of all models that are loaded, as the proxy knows them."""
        return (slot for process in self.rig.running.pool.processes for slot in process.slots)

    def n_waiting(self) -> int:
        return self.rig.running.pool.n_waiting

    def loaded(self) -> set[str]:
        if isinstance(self.host, Router):
            return {model for model, status in self.host.statuses().items() if status == "loaded"}
        return set(self.host.states())


def _keyed(key: str) -> dict[str, Any]:
    return {"apiKeys": [key]} if key else {}


StartModels = Callable[..., AbstractAsyncContextManager[Models]]


@pytest.fixture(params=["router", "swap"])
def start_models(request: pytest.FixtureRequest, tmp_path: Path) -> StartModels:
    """Return a function that starts a host of models, of which one is loaded at a time."""

    @asynccontextmanager
    async def start(key: str = "", **settings: Any) -> AsyncIterator[Models]:
        slots = tmp_path / "slots"
        slots.mkdir(mode=0o700)
        kinds = {kind: kind for kind in KINDS}
        host: Host
        if request.param == "router":
            models = link_models(tmp_path / "models", kinds)
            (models / "broken.gguf").write_bytes(b"GGUF")
            keyed = ("--api-key", key) if key else ()
            log_path = tmp_path / "router.log"
            host = Router(models, slots, n_ctx=32768, extra_args=keyed, log_path=log_path)
        else:
            kinds["broken"] = "full"
            settings_of = {"broken": {"cmd": "/bin/false"}}
            host = Swap(tmp_path, kinds, slots, n_ctx=32768, settings=settings_of, **_keyed(key))
        settings |= {"upstream_api_key": key} if key else {}
        # What is written back is what a swap has written back, not what was idle.
        async with Rig(host, slots, **{"idle_save_seconds": 3600.0, **settings}) as rig:
            yield Models(rig, host)

    return start


async def test_conversation_goes_on_after_its_model_was_swapped_out(
    start_models: StartModels,
) -> None:
    requests = agent_requests(2, 1, header=HEADER)[:3]
    async with start_models() as models:
        await models.measure_all()
        for messages in requests[:1]:
            for kind in KINDS:
                await models.n_new(kind, messages)
                reply = await models.ask(kind, messages)
                assert reply["model"] and models.loaded() == {kind}
                usage, record = reply["usage"], await models.last_request()
                assert record["kind"] != "retry"
                n_cached = usage["prompt_tokens_details"]["cached_tokens"]
                assert usage["prompt_tokens"] - n_cached == record["evaluated"]
        for messages in requests[1:]:
            for kind in KINDS:
                reply = await models.ask(kind, messages)
                record = await models.last_request()
                n_counted = models.host.evaluated_tokens(kind)
                n_new = await models.n_new(kind, messages)
                assert record["server"] == kind
                assert record["evaluated"] <= n_new + SLACK_TOKENS, (kind, record)
                assert n_counted == record["evaluated"] + CANARY_TOKENS
                assert reply["usage"]["prompt_tokens"] == len(models.sequences[kind][-1])


async def test_clients_of_several_models_take_turns_and_get_right_answers(
    start_models: StartModels,
) -> None:
    """Each client goes on with its conversation as fast as it can; the models push each other out."""
    requests = agent_requests(1, 2, header=[system(60)])
    async with start_models() as models:

        async def converse(model: str) -> list[str]:
            replies = [await models.ask(model, messages, max_tokens=4) for messages in requests]
            return [str(reply["choices"][0]["message"]) for reply in replies]

        said = dict(zip(KINDS, await asyncio.gather(*map(converse, KINDS)), strict=True))
        # Warming keeps its model loaded, although the others want it to go.
        others = [models.ask(kind, requests[0], max_tokens=1) for kind in KINDS if kind != "full"]
        told, *_ = await asyncio.gather(models.warm("full", requests[1]), *others)
        assert "warmed" in told, told
        assert models.n_waiting() == 0 and len(models.loaded()) == 1
        await models.rig.stop_proxy()
        for kind in KINDS:
            for messages, answer in zip(requests, said[kind], strict=True):
                assert str(await models.ask_host(kind, messages)) == answer


async def test_model_that_is_wanted_does_not_wait_for_all_who_come_later(
    start_models: StartModels,
) -> None:
    question = [{"role": "user", "content": "count"}]
    ended: list[str] = []

    async def ask(models: Models, name: str, model: str, n_tokens: int) -> None:
        await models.ask(model, question, max_tokens=n_tokens, ignore_eos=True)
        ended.append(name)

    async with start_models() as models:
        await models.measure_all()
        await until(lambda: not any(slot.is_leased for slot in models.slots()))
        async with asyncio.TaskGroup() as group:
            group.create_task(ask(models, "long", "full", 1000))
            await until(lambda: any(slot.is_leased for slot in models.slots()))
            group.create_task(ask(models, "other", "hybrid", 2))
            await until(lambda: models.n_waiting() or ended)
            group.create_task(ask(models, "later", "full", 2))
        assert ended == ["long", "other", "later"]


async def test_what_happens_to_models_behind_the_proxys_back(start_models: StartModels) -> None:
    first, second = agent_requests(1, 1, header=HEADER)
    async with start_models() as models:
        await models.measure_all()
        await models.ask("hybrid", first)
        # A client has it unloaded: it is written back before.
        await models.unload("hybrid")
        assert not models.loaded()
        await models.n_new("hybrid", first)
        n_new = await models.n_new("hybrid", second)
        await models.ask("hybrid", second)
        assert (await models.last_request())["evaluated"] <= n_new + SLACK_TOKENS
        # Its process dies: that is told in an error event, and the next request has it loaded again.
        async with models.answering("hybrid", second) as reply:
            models.kill("hybrid")
            *_, last = (await reply.read()).strip().split(b"\n\n")
            assert last.startswith(b"data: {") and b'"server_error"' in last, last
        async with asyncio.timeout(HANG_SECONDS):
            several = ("hybrid", "full", "hybrid")
            await asyncio.gather(*(models.ask(model, second, max_tokens=1) for model in several))
        # Nobody has a model of this name, and the host says so in its own words.
        refusal = await models.refusal("nobody", CHAT)
        assert refusal == await models.refusal("nobody", CHAT, models.host.base_url)
        status, words = await models.refusal("nobody", "/v1/messages/count_tokens")
        assert status == refusal[0] and words.startswith('{"type":"error"')
        if isinstance(models.host, Router):
            status, words = await models.refusal("broken", CHAT)
            assert status == 500 and "model name=broken failed to load" in words
        counted = await models.rig.post(
            "/v1/messages/count_tokens", {"model": "full", "messages": first[1:]}
        )
        assert counted["input_tokens"] > 0 and models.loaded() == {"full"}
        await models.rig.reasons_are()


async def test_requests_that_wait_for_a_model_need_one_load(start_models: StartModels) -> None:
    question = [{"role": "user", "content": "hello"}]
    async with start_models() as models:
        with capture_logs() as logs:
            asked = [models.ask(kind, question, max_tokens=1) for kind in KINDS * 3]
            await asyncio.gather(*asked)
        loaded = [line["model"] for line in logs if line["event"] == "model loaded"]
        assert sorted(loaded) == sorted(KINDS)


async def test_model_that_cannot_be_loaded_takes_no_room_from_others(
    start_models: StartModels,
) -> None:
    """Its host tries again for each request, and then loads nothing else."""
    question = [{"role": "user", "content": "hello"}]
    async with start_models() as models:
        with capture_logs() as logs:
            for _ in range(3):
                asked = [models.ask(kind, question, max_tokens=1) for kind in KINDS]
                refused, *_ = await asyncio.gather(models.refusal("broken", CHAT), *asked)
                assert refused[0] == 500
        failed = [line["model"] for line in logs if line["event"] == "model not loaded"]
        assert failed == ["broken"] * 3
        assert models.rig.n_faults() == 0


async def test_death_that_a_swap_has_not_noticed_is_waited_out(
    tmp_path: Path, directory: Path
) -> None:
    first, second = agent_requests(1, 1, header=HEADER)
    model = least_model("full")
    server = LlamaServer(model, directory, n_slots=2, n_ctx=32768)
    # What llama-swap watches lives on until that is told.
    is_told = tmp_path / "told"
    lives_on = f"while [ ! -e {shlex.quote(str(is_told))} ]; do sleep 0.05; done"
    command = shlex.join(["sh", "-c", f"{shlex.join(server.command())}; {lives_on}"])
    settings = {"full": {"cmd": command, "proxy": server.base_url}}
    host = Swap(tmp_path, {"full": "full"}, settings=settings)
    async with Rig(host, directory) as rig:
        models = Models(rig, host)
        await models.ask("full", first)
        await models.rig.reasons_are()
        await rig.settled()
        (wrapper,) = child_pids(host.pid)
        (pid,) = child_pids(wrapper)
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(await_end, [pid])
        assert await models.refusal("full", CHAT, host.base_url) == (502, "")
        asked = asyncio.ensure_future(models.ask("full", second))
        await rig.reasons_are("llama-server unreachable")
        is_told.touch()
        await asked
        assert (await models.last_request())["chosen"] == "restore"
        await models.rig.reasons_are()


async def test_models_seen_together_do_not_wait_for_each_other(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "_LOOK_SECONDS", 0.1)
    group = {"swap": False, "members": ["full", "hybrid"]}
    kinds = {"full": "full", "hybrid": "hybrid"}
    host = Swap(tmp_path, kinds, directory, n_ctx=LONG_CTX, groups={"both": group})
    question = [{"role": "user", "content": "count"}]
    async with Rig(host, directory) as rig:
        models = Models(rig, host)
        # Loaded without the proxy, which sees it at its next look.
        for model in kinds:
            await models.ask_host(model, question)
        await models.attached({"full", "hybrid"})
        await models.rig.reasons_are()
        await rig.settled()  # a look at its slots would have llama-swap load a model again
        async with models.answering("full", question):
            host.request("POST", "/api/models/unload/hybrid", {})
            await models.attached({"full"})
            await models.ask("hybrid", question, max_tokens=1)
            _, slots = await asyncio.to_thread(host.request, "GET", "/upstream/full/slots")
            assert any(slot["is_processing"] for slot in slots)


@asynccontextmanager
async def at_a_swap(tmp_path: Path, **full: Any) -> AsyncIterator[Models]:
    """Run a llama-swap with two models, and the proxy before it; *full* are settings of the first."""
    slots = tmp_path / "slots"
    slots.mkdir(mode=0o700)
    kinds = {"full": "full", "hybrid": "hybrid"}
    host = Swap(tmp_path, kinds, slots, n_ctx=32768, settings={"full": full})
    async with Rig(host, slots) as rig:
        yield Models(rig, host)


async def test_names_and_paths_at_a_swap(tmp_path: Path) -> None:
    """What only llama-swap has: names that it does not list, and paths with a model."""
    first, second = agent_requests(1, 1, header=HEADER)
    async with at_a_swap(tmp_path, aliases=["gpt"]) as models:
        await models.ask("full", first)
        await models.rig.reasons_are()
        await models.ask("gpt", second)
        record = await models.last_request()
        assert (record["server"], record["chosen"]) == ("full", "live")
        path = f"/upstream/full{CHAT}"
        await models.rig.post(path, {"messages": second, "tools": TOOLS, "max_tokens": 1})
        record = await models.last_request()
        assert (record["path"], record["chosen"]) == (CHAT, "live")


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_path_for_which_a_swap_loads_nothing_leaves_the_loaded_model_alone(
    tmp_path: Path, method: str
) -> None:
    async with at_a_swap(tmp_path) as models:
        await models.ask("full", agent_requests(1, 0, header=[system(50)])[0])
        ask = partial(models.rig.client.request, method)
        async with ask(models.rig.base_url + "/upstream/hybrid/bundle.js") as reply:
            assert reply.status == 409
            assert method == "HEAD" or "ignorePaths" in await reply.text()
        assert models.loaded() == {"full"}
        async with ask(models.rig.base_url + "/health?model=hybrid") as reply:
            assert reply.status == 200 or method == "HEAD"
        assert models.loaded() == {"full"}
        async with ask(f"{models.rig.base_url}/upstream/hybrid/props") as reply:
            assert reply.status == 200
        assert models.loaded() == {"hybrid"}


async def test_log_tells_what_a_swap_says_of_a_model_that_does_not_start(tmp_path: Path) -> None:
    said = "unspecific error: upstream command exited prematurely"
    async with at_a_swap(tmp_path, cmd="/bin/false") as models:
        with capture_logs() as logs:
            assert (await models.refusal("full", CHAT))[0] == 500
        (line,) = [line for line in logs if line["event"] == "model not loaded"]
        assert line["reason"] == f"llama-server answered 500: {said}"
        assert (await models.last_request())["why"] == said


async def test_model_that_nobody_asks_is_unloaded_at_a_swap_and_restored(tmp_path: Path) -> None:
    """The proxy's own looks do not keep it loaded."""
    first, second = agent_requests(1, 1, header=HEADER)
    async with at_a_swap(tmp_path, ttl=2) as models:
        await models.ask("full", first)
        await models.rig.reasons_are()
        await models.ask("full", second)
        await until(lambda: not models.loaded())
        await models.ask("full", second)
        assert (await models.last_request())["chosen"] == "restore"


async def test_model_that_is_no_llama_server_is_unloaded_at_a_swap_when_nobody_asks(
    tmp_path: Path,
) -> None:
    """Speech and image models, say."""
    (tmp_path / "health").touch()
    port = find_free_port()
    files = (sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1")
    command = shlex.join([*files, "--directory", str(tmp_path)])
    other = {"cmd": command, "proxy": f"http://127.0.0.1:{port}", "ttl": 2}
    async with at_a_swap(tmp_path, **other) as models:
        with capture_logs() as logs:
            assert (await models.refusal("full", CHAT))[0] == 501
        assert [line["event"] for line in logs if line.get("model") == "full"][0] == "model loaded"
        await models.rig.reasons_are("not a llama-server")
        await until(lambda: not models.loaded())
        await models.rig.reasons_are()


async def test_nobody_without_a_key_has_models_swapped(start_models: StartModels) -> None:
    hello = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    async with start_models(key="right") as models:
        url, client = models.rig.base_url, models.rig.client
        for model, key, status in (
            ("full", "right", 200),
            ("hybrid", "wrong", 401),
            ("hybrid", "", 401),
            ("full", "wrong", 401),
        ):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            for path in (CHAT, "/v1/messages/count_tokens"):
                body = {"model": model, **hello}
                async with client.post(url + path, json=body, headers=headers) as reply:
                    assert (reply.status, path) == (status, path)
        async with client.get(f"{url}/props?model=hybrid") as reply:
            assert reply.status == 401
        assert await asyncio.to_thread(_loaded_with_key, models.host, "right") == {"full"}


def _loaded_with_key(host: Host, key: str) -> set[str]:
    path = "/models" if isinstance(host, Router) else "/running"
    sent = urllib.request.Request(host.base_url + path, headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(sent, timeout=HANG_SECONDS) as reply:
        told = json.load(reply)
    if isinstance(host, Router):
        return {m["id"] for m in told["data"] if m["status"]["value"] == "loaded"}
    return {run["model"] for run in told["running"]}


async def test_llama_server_that_replaces_a_router_is_served_as_such(tmp_path: Path) -> None:
    slots = tmp_path / "slots"
    slots.mkdir(mode=0o700)
    models = link_models(tmp_path / "models", {"full": "full"})
    router: Host = Router(models, slots, n_ctx=4096, log_path=tmp_path / "router.log")
    question = [{"role": "user", "content": "hello"}]
    async with Rig(router, slots) as rig:
        await rig.chat(question, model="full", max_tokens=1)
        await Models(rig, router).attached({"full"})
        router.stop()
        model = least_model("full")
        with LlamaServer(model, slots, port=router.port, log_path=tmp_path / "one.log"):
            await Models(rig, router).attached({router.base_url.removeprefix("http://")})
            await rig.reasons_are()
        router.start()
        await rig.chat(question, model="full", max_tokens=1)
        await Models(rig, router).attached({"full"})


@asynccontextmanager
async def at_a_router(tmp_path: Path, *extra_args: str, **options: Any) -> AsyncIterator[Models]:
    """Run a router with two models and these flags, and the proxy before it; idle slots are not saved."""
    slots = tmp_path / "slots"
    slots.mkdir(mode=0o700)
    folder, log_path = link_models(tmp_path / "models", {k: k for k in KINDS}), tmp_path / "log"
    options = {"n_ctx": 32768, "extra_args": extra_args, "log_path": log_path, **options}
    router = Router(folder, slots, **options)
    async with Rig[Host](router, slots, idle_save_seconds=3600.0, drain_seconds=60.0) as rig:
        yield Models(rig, router)


async def test_router_that_is_started_anew_for_fewer_models_is_not_asked_for_more(
    tmp_path: Path,
) -> None:
    first, second = agent_requests(1, 1, header=HEADER)
    async with at_a_router(tmp_path, models_max=2) as models:
        await models.measure_all()
        await asyncio.to_thread(models.host.stop)
        assert isinstance(models.host, Router)
        models.host.models_max = 1
        await asyncio.to_thread(models.host.start)
        await models.ask("hybrid", first)
        n_first, n_new = [await models.n_new("hybrid", each) for each in (first, second)]
        # Where the router itself makes room, nothing is saved before.
        await models.ask("full", first, max_tokens=1)
        await models.ask("hybrid", second)
        assert (await models.last_request())["evaluated"] <= n_new + SLACK_TOKENS < n_first


async def test_model_that_is_loaded_by_hand_alone_is_not_loaded_for_a_request(
    tmp_path: Path,
) -> None:
    async with at_a_router(tmp_path, "--no-models-autoload") as models:
        await models.rig.post("/models/load", {"model": "full"})
        await until(lambda: models.loaded() == {"full"})
        for path in (CHAT, "/v1/messages/count_tokens"):
            status, words = await models.refusal("hybrid", path)
            assert status == 400 and "model is not loaded" in words
        assert models.loaded() == {"full"}
        await models.attached({"full"})
        await models.ask("full", [{"role": "user", "content": "hello"}], max_tokens=1)
        assert (await models.last_request())["server"] == "full"


async def test_model_that_is_loaded_beside_the_others_holds_up_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "_LOOK_SECONDS", 0.1)
    question = [{"role": "user", "content": "hello"}]
    async with at_a_router(tmp_path, models_max=2, n_ctx=LONG_CTX) as models:
        await models.ask("full", question, max_tokens=1)
        async with models.answering("full", question), asyncio.TaskGroup() as asking:
            asking.create_task(models.rig.post("/models/load", {"model": "hybrid"}))
            await models.attached({"full", "hybrid"})
            asking.create_task(models.unload("hybrid"))
            await until(lambda: models.loaded() == {"full"})
            await models.ask("full", question, max_tokens=1)
            assert any(slot.is_leased for slot in models.slots())


@pytest.mark.parametrize("method", ["POST", "HEAD"])
async def test_model_that_a_form_or_a_query_names_makes_the_other_one_be_saved_first(
    tmp_path: Path, method: str
) -> None:
    """Sounds come as forms; some monitors ask with HEAD."""
    asked = agent_requests(1, 2, header=HEADER)
    async with at_a_router(tmp_path) as models:
        await models.measure_all()
        for each in asked[:2]:  # the first one is saved at once
            await models.ask("hybrid", each)
        *_, n_new = [await models.n_new("hybrid", each) for each in asked]
        path, status, form = "/props?model=full", 200, None
        if method == "POST":
            path, status = "/v1/audio/transcriptions", 501
            form = aiohttp.FormData({"model": "full"})
            form.add_field("file", b"RIFF", filename="sound.wav")
        url = models.rig.base_url + path
        async with models.rig.client.request(method, url, data=form) as reply:
            assert reply.status == status and models.loaded() == {"full"}
        await models.ask("hybrid", asked[-1])
        assert (await models.last_request())["evaluated"] <= n_new + SLACK_TOKENS
