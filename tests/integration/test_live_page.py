"""What the live page is served and told."""

import asyncio
import re
from typing import Any, cast

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from yarl import URL

from proxy.core.rates import Rates
from proxy.explain import report
from proxy.explain.report import sums_at
from proxy.explain.views import History
from proxy.llama.client import SlotStatus
from proxy.servers import background
from proxy.serving.process import RATES
from proxy.serving.services import HISTORY
from proxy.web.page import POLICY, LivePage
from tests.integration.conftest import StartRig
from tests.integration.rig import CHAT, Rig, question
from tests.lab.waiting import until


async def look(rig: Rig, since: str) -> dict[str, Any]:
    async with rig.client.get(rig.admin_url + "/overview", params={"since": since}) as reply:
        return msgspec.json.decode(await reply.read(), type=dict[str, Any])


async def test_page_is_told_of_requests_as_they_end_and_once(start_rig: StartRig) -> None:
    async with start_rig() as rig:
        first = await look(rig, since="")
        assert first["state"] == "caching" and first["servers"] and not first["requests"]
        assert {slot["state"] for slot in first["servers"][0]["slots"]} == {"empty"}
        await rig.chat(question("a"))
        await rig.settled()
        overview = await look(rig, since="")
        assert overview["today"]["n_requests"] == len(overview["requests"]) == 1
        again = await look(rig, since=first["position"])
        assert again["requests"] == overview["requests"]
        assert (await look(rig, since=again["position"]))["requests"] == []
        assert (await look(rig, since="another-9"))["requests"] == again["requests"]
        foreign = {"Origin": "http://another.site"}
        async with rig.client.get(rig.admin_url + "/overview", headers=foreign) as reply:
            assert reply.status == 403
        for path, status in (("/", 403), ("/requests", 403), ("/tree", 403), ("/health", 200)):
            rebound = {"Host": "another.site"}
            async with rig.client.get(rig.admin_url + path, headers=rebound) as reply:
                assert reply.status == status


async def test_page_may_load_only_its_own_files_and_they_are_there() -> None:
    app, nothing = web.Application(), cast(Any, None)
    app.add_routes(LivePage(nothing, nothing).routes())
    async with TestServer(app) as server, aiohttp.ClientSession(server.make_url("/")) as client:
        async with client.get("/") as reply:
            assert reply.status == 200 and reply.headers["Content-Security-Policy"] == POLICY
            index, etag = await reply.text(), reply.headers["ETag"]
        names = re.findall(r'="page/([^"]+)"', index)
        assert {"app.js", "style.css", "icon.svg"} <= set(names)
        for name in names:
            async with client.get(f"/page/{name}") as reply:
                assert reply.status == 200 and reply.headers["X-Content-Type-Options"] == "nosniff"
        async with client.get("/", headers={"If-None-Match": etag}) as reply:
            assert reply.status == 304
        for name in ("none.js", "..%2Ffiles.py", "files.py"):
            async with client.get(URL(f"/page/{name}", encoded=True)) as reply:
                assert reply.status == 404


async def test_request_in_flight_is_told_with_what_it_waits_for(start_rig: StartRig) -> None:
    async with start_rig(n_slots=1) as rig:
        gate = rig.server.hold("generate")
        running = [asyncio.ensure_future(rig.chat(question("a")))]
        await gate.reached()
        running.append(asyncio.ensure_future(rig.chat(question("b"))))
        await rig.waiting(1)
        [flight, waiting] = (await look(rig, ""))["in_flight"]
        assert (flight["phase"], waiting["phase"]) == ("evaluates", "waits for a slot")
        assert flight["slot"] == 0 and flight["n_prompt"] > 0 and waiting["slot"] is None
        assert flight["client"].startswith("Python") and flight["title"]
        assert flight["path"] == CHAT, "the page shows it where there are no words and no client"
        gate.open()
        await asyncio.gather(*running)
        await until(lambda: not rig.running.shared.journal.in_flight)
        assert (await look(rig, ""))["in_flight"] == []


async def test_request_without_a_plan_is_not_told_the_progress_of_another(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def told(page: LivePage) -> None:
        for slot in (0, 1):
            status = SlotStatus(slot, True, 1, 309, 309, 0, [{"n_decoded": 500}])
            page._progress["", slot] = status

    monkeypatch.setattr(LivePage, "_ask", told)
    async with start_rig(n_slots=2) as rig:
        gate = rig.server.hold("chunk")
        body = {"messages": question("a"), "stream": True}
        running = [
            asyncio.ensure_future(rig.post(CHAT, body | more))
            for more in ({}, {"cache_prompt": False})
        ]
        flights = rig.running.shared.journal.in_flight
        await until(
            lambda: len(flights) == 2 and all(f.answering.is_set() for f in flights.values())
        )
        await look(rig, "")
        told_of = [(f["slot"], f["n_generated"]) for f in (await look(rig, ""))["in_flight"]]
        assert [n if slot is None else -n for slot, n in told_of] == [-500, 0]
        gate.open()
        await asyncio.gather(*running)


async def test_history_goes_on_after_a_restart(start_rig: StartRig) -> None:
    async with start_rig() as rig:
        await rig.chat(question("a", 300))
        await rig.settled()
        before = await history(rig)
        assert before["today"]["n_requests"] == 1 and before["hours"][0][1] == 1
        await rig.stop_proxy()
        await rig.start_proxy()
        assert await history(rig) == before
        await rig.chat(question("a", 300))
        await rig.settled()
        after = await history(rig)
        assert after["today"]["n_requests"] == 2
        assert sum(minute[1] for minute in after["minutes"]) == 2


async def test_history_and_rates_are_written_while_the_proxy_runs(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy that is killed loses a minute of them."""
    monkeypatch.setattr(background, "_WRITE_SECONDS", 0.02)
    async with start_rig() as rig:
        process = await rig.attached()
        await rig.chat(question("a", 300))
        await rig.settled()
        store = rig.running.shared.store
        await until(lambda: store.index.value(HISTORY, History) == rig.running.shared.journal.past)
        await until(lambda: process.remembered(RATES, Rates) == process.rates != Rates())


async def test_history_of_a_new_day_begins_at_zero_before_its_first_request(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_rig() as rig:
        await rig.chat(question("a", 300))
        await rig.settled()
        monkeypatch.setattr(report, "sums_at", lambda day, now: sums_at(day, now + 24 * 3600))
        next_day = await history(rig)
        assert next_day["today"]["n_requests"] == 0 and next_day["hours"][0][1] == 1


async def history(rig: Rig) -> Any:
    async with rig.client.get(rig.admin_url + "/history") as reply:
        return msgspec.json.decode(await reply.read())
