"""The live page in a real Chromium, before the proxy on the real llama-server, with traffic."""

import asyncio
from importlib.resources import files
from typing import Any

from proxy.explain.views import Span
from tests.lab.browser import Page, open_page
from tests.lab.conversation import agent_requests, system, tools
from tests.lab.rig import Rig
from tests.lab.server import find_free_port
from tests.lab.waiting import until
from tests.live.conftest import StartRig

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"
MESSAGES = agent_requests(2, 1, header=[system(60)])
TOOLS = tools(2)
HELD = """(() => {{
  const ask = window.fetch, held = new Promise((go) => (window.letGo = go));
  window.isHandled = false;
  window.fetch = (path, ...how) => {{
    if (!path.startsWith("{}")) return ask(path, ...how);
    window.fetch = ask;
    return ask(path, ...how).then(async (reply) => {{
      const content = await reply.json();
      await held;
      setTimeout(() => (window.isHandled = true));
      return {{ ok: reply.ok, status: reply.status, json: () => content }};
    }});
  }};
}})()"""
"""Has the next answer to a path come only when it is let go."""
FAILS_ONCE = """(() => {{
  const ask = window.fetch;
  window.hasFailed = false;
  window.fetch = (path, ...how) => {{
    if (!path.startsWith("{}")) return ask(path, ...how);
    window.fetch = ask;
    setTimeout(() => (window.hasFailed = true));
    return Promise.reject(new TypeError("Failed to fetch"));
  }};
}})()"""
"""Has the next request for a path fail."""
ROWS = "document.querySelectorAll('#requests tbody tr[data-id]')"


def asked_on(day: str) -> list[dict[str, Any]]:
    told = f"{HOSTILE} It is {day}, a fine day for work. " + "Answer in whole sentences. " * 20
    return [{"role": "system", "content": told}, {"role": "user", "content": "Hello"}]


async def test_page_shows_what_happens_as_it_happens_and_why(start_rig: StartRig) -> None:
    # When the proxy comes back, another connection could have a port that the kernel gives away.
    admin = f"127.0.0.1:{find_free_port()}"
    async with start_rig("hybrid", admin=admin) as rig, open_page() as page:
        await page.goto(rig.admin_url + "/")
        await empty_state_says_where_to_point_a_client(rig, page)
        for messages in (*MESSAGES, asked_on("2026-11-20")):
            await rig.chat(messages, tools=TOOLS, max_tokens=2)
        await rig.settled()
        await page.goto(rig.admin_url + "/")
        await page.until(f"{ROWS}.length === {len(MESSAGES) + 1}")
        await slots_and_sums_are_shown(page)
        await new_request_appears_and_is_explained(rig, page)
        await misses_and_conversations_are_chosen(page)
        await request_that_ends_during_a_pause_has_one_row(rig, page)
        await store_opens_by_keyboard(page)
        await late_answer_does_not_replace_what_was_chosen_since(page)
        await states_are_pinned_and_deleted_after_a_question(rig, page)
        await energy_is_counted_with_the_watts_that_are_given(page)
        await error_of_llama_server_is_called_so(rig, page)
        await requests_in_flight_are_shown_first(rig, page)
        await nothing_is_wider_than_a_phone(page)
        await names_and_contrasts_are_as_they_should_be(page)
        await history_is_asked_for_again_after_it_could_not_be_had(rig, page)
        await page_goes_on_when_the_proxy_comes_back(rig, page)
        await history_is_that_of_the_proxy_before(page)
        asked = [url for url in page.requested if not url.startswith(rig.admin_url + "/")]
        assert asked == []


async def empty_state_says_where_to_point_a_client(rig: Rig, page: Page) -> None:
    await page.until("!document.querySelector('#welcome').hidden")
    told = await page.run("document.querySelector('#welcome').innerText")
    assert "/v1" in told and "llama-prefix-cache connect opencode" in told
    assert not await page.run("document.querySelector('#requests').checkVisibility()")


async def slots_and_sums_are_shown(page: Page) -> None:
    assert await page.run("document.querySelector('#state').innerText") == "Caching"
    assert await page.run("document.querySelector('#welcome').hidden")
    slots = await page.run("document.querySelector('#slots tbody').innerText")
    assert "Idle" in slots and "tokens" in slots
    figures = await page.run("document.querySelector('#figures').innerText")
    assert "of prompts reused" in figures and "stored" in figures
    bars = f"[...{ROWS}].map(row => row.querySelector('.bar .reused').style.width)"
    widths = [float(width.rstrip("%")) for width in await page.run(bars)]
    assert widths[-1] == 0 and 50 < max(widths) < 100
    await history_tells(page, f"{len(MESSAGES) + 1} requests")
    await page.run("document.querySelector('#period [data-name=days]').click()")
    assert await page.run("document.querySelectorAll('#history .stack').length") == 30
    await page.run("document.querySelector('#unit [data-name=seconds]').click()")
    saved = "[...document.querySelectorAll('#history .stack > *')].map(part => part.style.height)"
    assert {"0%", "100%"} == set(await page.run(saved)), "all was saved today"
    assert "saved" in await page.run("document.querySelector('#history-sum').innerText")
    await page.run("document.querySelector('#unit [data-name=tokens]').click()")


async def new_request_appears_and_is_explained(rig: Rig, page: Page) -> None:
    before = await page.run(f"{ROWS}.length")
    await rig.chat(asked_on("2026-11-21"), tools=TOOLS, max_tokens=2)
    await page.until(f"{ROWS}.length === {before} + 1")
    assert "1 new request" in await page.run("document.querySelector('#news').textContent")
    assert await page.run(f"{ROWS}[0].querySelector('.title').innerText") == "Hello"
    assert await page.run(f"{ROWS}[0].querySelector('.miss').innerText") == "date"
    await page.run(f"{ROWS}[0].querySelector('.miss').click()")
    await page.until("document.querySelector('.explanation')")
    told = await page.run("document.querySelector('.explanation').innerText")
    assert "In the system prompt" in told and HOSTILE in told
    assert await page.run("document.querySelector('.explanation del').innerText") == "20"
    assert await page.run("document.querySelector('.explanation ins').innerText") == "21"
    assert await page.run("document.querySelectorAll('img, main script').length") == 0
    await kind_and_costs_are_told(rig, page)
    await rig.settled()  # what is saved later changes the map


async def error_of_llama_server_is_called_so(rig: Rig, page: Page) -> None:
    body = {"messages": MESSAGES[0], "max_tokens": "many"}
    async with rig.client.post(f"{rig.base_url}/v1/chat/completions", json=body) as reply:
        assert reply.status == 400
    row = f"[...{ROWS}].find(row => row.innerText.includes('refused'))"
    await page.until(row)
    await page.run(f"{row}.querySelector('button[aria-expanded]').click()")
    told = "[...document.querySelectorAll('.explanation')].map(e => e.innerText).join()"
    await page.until(f"/Error\\s+Field 'max_tokens'/.test({told})")


async def kind_and_costs_are_told(rig: Rig, page: Page) -> None:
    async with rig.client.get(rig.admin_url + "/requests/last") as reply:
        told = await reply.json()
    kind, costs = told["request"]["kind"], told["costs"]
    assert kind and kind in await page.run(f"{ROWS}[0].innerText")
    assert kind in await page.run("document.querySelector('.explanation').innerText")
    parts = "document.querySelector('.explanation details:has(.number)')"
    n_tools = sum(cost["n_tokens"] for cost in costs if cost["part"] == "tools")
    summary = await page.run(f"{parts}.querySelector('summary').innerText")
    assert n_tools and summary.endswith(f"{len(costs)} parts, tools {n_tools:,}")
    await page.run(f"{parts}.open = true")
    largest = await page.run(f"{parts}.querySelector('tr').innerText")
    assert largest.startswith(f"{max(cost['n_tokens'] for cost in costs):,}")


async def misses_and_conversations_are_chosen(page: Page) -> None:
    n_all = await page.run(f"{ROWS}.length")
    await page.run("document.querySelector('.figure.bad').click()")
    missed = f"[...{ROWS}].every(row => row.querySelector('.miss'))"
    await page.until(f"0 < {ROWS}.length && {ROWS}.length < {n_all} && {missed}")
    await page.run("document.querySelector('#which [data-name=all]').click()")
    await page.until(f"{ROWS}.length === {n_all}")
    # "Hello" was asked on two days: that is one conversation, and where it broke is seen.
    await page.run(f"{ROWS}[0].querySelector('.title').click()")
    await page.until("document.querySelectorAll('#turns .stack').length === 2")
    missed = "[...document.querySelectorAll('#turns .missed')].map(part => part.style.height)"
    assert [height != "0%" for height in await page.run(missed)] == [False, True]
    await page.run("document.querySelector('#turns button.stack').click()")
    await page.until("document.querySelector('.explanation')")
    await page.run("document.querySelector('#every-conversation').click()")
    await page.until(f"{ROWS}.length === {n_all} && document.querySelector('#turns').hidden")


async def request_that_ends_during_a_pause_has_one_row(rig: Rig, page: Page) -> None:
    n_before = await page.run(f"{ROWS}.length")
    await page.run("document.querySelector('#pause').click()")
    await rig.chat(asked_on("2026-11-24"), tools=TOOLS, max_tokens=2)
    await rig.settled()
    await page.run("document.querySelector('#which [data-name=all]').click()")
    await page.until(f"{ROWS}.length === {n_before} + 1")
    await rig.chat(asked_on("2026-11-25"), tools=TOOLS, max_tokens=2)
    await page.run("document.querySelector('#pause').click()")
    await page.until(f"{ROWS}.length > {n_before} + 1")
    ids = await page.run(f"[...{ROWS}].map(row => row.dataset.id)")
    assert len(ids) == len(set(ids)) == n_before + 2


async def store_opens_by_keyboard(page: Page) -> None:
    await page.until("document.querySelector('#map .cell')")
    await page.until("/Task/.test(document.querySelector('#map').innerText)")
    assert "tokens" in await page.run("document.querySelector('#map').innerText")
    await page.run("document.querySelector('#requests-title').focus()")
    for _ in range(100):
        if await page.run("document.activeElement.closest('#map') !== null"):
            break
        await page.press("Tab")
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert await page.run(outline) == "solid", "the focus can be seen"
    await page.press("Enter")
    await page.until("document.querySelector('#states li')")
    state = await page.run("document.querySelector('#states li').innerText")
    assert "tokens" in state and "made" in state


async def late_answer_does_not_replace_what_was_chosen_since(page: Page) -> None:
    n_all = await page.run(f"{ROWS}.length")
    await page.run(HELD.format("requests?"))
    await page.run("document.querySelector('.figure.bad').click()")
    await page.run(f"{ROWS}[0].isOld = true")
    await page.run("document.querySelector('#which [data-name=all]').click()")
    await page.until(f"!{ROWS}[0].isOld")
    await page.run("window.letGo()")
    await page.until("window.isHandled")
    assert await page.run(f"{ROWS}.length") == n_all
    await page.run(HELD.format("checkpoints?"))
    chosen = await page.run(
        "[...document.querySelectorAll('.cell')].slice(0, 2).map(c => (c.click(), c.dataset.node))"
    )
    shown = "document.querySelector('#states').dataset.node"
    await page.until(f"{shown} === {chosen[1]!r}")
    await page.run("window.letGo()")
    await page.until("window.isHandled")
    assert await page.run(shown) == chosen[1]


async def states_are_pinned_and_deleted_after_a_question(rig: Rig, page: Page) -> None:
    assert rig.running.store is not None
    await page.run(
        "[...document.querySelectorAll('.cell')].find(c => /Task/.test(c.innerText)).click()"
    )
    button = "[...document.querySelectorAll('#states button')].find(b => b.innerText === '{}')"
    await page.until("/Task/.test(document.querySelector('#states h3').innerText)")
    await page.run(button.format("Pin") + ".click()")
    await page.until("document.querySelector('#map .pinned')")
    assert any(checkpoint.is_pinned for checkpoint in rig.running.store)
    await page.until(button.format("Unpin"))
    # A change while the page still rests from the one before is seen after the rest.
    pinned = next(checkpoint.id for checkpoint in rig.running.store if checkpoint.is_pinned)
    await rig.running.store.pin(pinned, is_pinned=False)
    await page.until("!document.querySelector('#map .pinned')")
    await page.until(button.format("Pin"))
    await rig.running.store.pin(pinned, is_pinned=True)
    await page.until("document.querySelector('#map .pinned')")
    await page.until(button.format("Unpin"))
    n_before = len(rig.running.store)
    await page.run(button.format("Delete …") + ".click()")
    await page.until("document.querySelector('dialog').open")
    asked = await page.run("document.querySelector('#confirm-title').innerText")
    assert "Delete" in asked and "Task" in asked and "pinned" in asked
    answer = "document.querySelector('dialog [value={}]').click()"
    await page.run(answer.format("no"))
    assert len(rig.running.store) == n_before
    # A quick hand: the dialog of the first answer has not said yet that it closed.
    asks = button.format("Delete …") + ".click()"
    await page.run(f"{asks}; {answer.format('no')}; {asks}; {answer.format('yes')}")
    store = rig.running.store
    await until(lambda: len(store) < n_before)
    await page.until("!document.querySelector('#map .pinned')")
    assert page.complaints == []


async def energy_is_counted_with_the_watts_that_are_given(page: Page) -> None:
    input_ = "document.querySelector('.figure input')"
    await page.run(f"({input_}.value = 36000, {input_}.dispatchEvent(new Event('input')))")
    shown = f"{input_}.closest('.figure').querySelector('.value').innerText"
    await page.until(f"/Wh$/.test({shown})")


async def requests_in_flight_are_shown_first(rig: Rig, page: Page) -> None:
    running = [
        asyncio.ensure_future(
            rig.chat(asked_on(f"2026-11-0{day}"), max_tokens=20_000, ignore_eos=True)
        )
        for day in range(1, 4)
    ]
    await page.until("document.querySelectorAll('#flights li').length === 3")
    await page.until("/waits for a slot/.test(document.querySelector('#flights').innerText)")
    flights = await page.run("document.querySelector('#flights').innerText")
    assert "Hello" in flights and "slot" in flights
    assert "1 request waiting" in await page.run("document.querySelector('#queue').innerText")
    for each in running:
        each.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await page.until("document.querySelectorAll('#flights li').length === 0")


async def nothing_is_wider_than_a_phone(page: Page) -> None:
    await page.resize(360, 740)
    # A conversation may have a long name.
    for name in ("#states h3", "#requests .title"):
        await page.run(f"document.querySelector('{name}').innerText = 'Qwen35_35B_'.repeat(8)")
    wide = "[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > 360)"
    await page.until(f"{wide}.length === 0")  # the map is drawn anew
    assert await page.run("document.documentElement.scrollWidth") == 360


async def names_and_contrasts_are_as_they_should_be(page: Page) -> None:
    await page.run((files("axe_core_python") / "axe.min.js").read_text())
    for scheme in ("light", "dark"):
        await page.prefer(prefers_color_scheme=scheme, prefers_reduced_motion="reduce")
        found = await page.run(
            "axe.run().then(r => r.violations.map(v => [v.id, v.nodes[0].html]))"
        )
        assert found == [], scheme
        assert await page.run("axe.run().then(r => r.passes.length)") > 20


async def history_is_asked_for_again_after_it_could_not_be_had(rig: Rig, page: Page) -> None:
    said = "document.querySelector('#history-sum').innerText"
    async with rig.client.get(rig.admin_url + "/history") as reply:
        n_ended = sum(minute[1] for minute in (await reply.json())["minutes"])
    await history_tells(page, f": {n_ended} requests")
    before = await page.run(said)
    await page.run(FAILS_ONCE.format("history"))
    await rig.chat(asked_on("2026-11-22"), tools=TOOLS, max_tokens=2)
    await page.until("window.hasFailed")
    assert await page.run(said) == before
    past = rig.running.shared.journal.past
    restored = Span(past.minutes[0].since - 600, saved_seconds=-past.today.saved_seconds / 2)
    past.minutes.insert(0, restored)
    await rig.chat(asked_on("2026-11-23"), tools=TOOLS, max_tokens=2)
    await page.until(f"{said} !== {before!r}")
    # Restores that took longer than evaluating are taken off what was saved.
    await page.run("document.querySelector('#period [data-name=hours]').click()")
    await page.run("document.querySelector('#unit [data-name=seconds]').click()")
    seconds = sum(span.saved_seconds for span in past.minutes)
    told = await page.run(f"import('/page/words.js').then((words) => words.seconds({seconds}))")
    await history_tells(page, f"{told} saved")
    await page.run("document.querySelector('#unit [data-name=tokens]').click()")
    await page.run("document.querySelector('#period [data-name=days]').click()")


async def page_goes_on_when_the_proxy_comes_back(rig: Rig, page: Page) -> None:
    assert page.complaints == []
    await rig.stop_proxy()
    await page.until("document.querySelector('#connection').className === 'gone'")
    n_misses = await page.run(f"[...{ROWS}].filter(row => row.querySelector('.miss')).length")
    assert 0 < n_misses < await page.run(f"{ROWS}.length")
    await page.run("document.querySelector('#which [data-name=misses]').click()")
    await page.until(f"{ROWS}.length === {n_misses}")
    await rig.start_proxy()
    await page.until("document.querySelector('#connection').innerText.startsWith('Live')")
    await page.goto(rig.admin_url + "/")
    # What a browser says of connections that were refused is the only thing it may complain of.
    assert [c for c in page.complaints if "net::ERR_" not in c] == []


async def history_tells(page: Page, text: str) -> None:
    await page.until(f"document.querySelector('#history-sum').innerText.includes({text!r})")


async def history_is_that_of_the_proxy_before(page: Page) -> None:
    await history_tells(page, " requests, ")
    await page.until("(document.querySelector('.figure .value')?.innerText ?? '–') != '–'")
    assert await page.run("document.querySelector('#welcome').hidden")
