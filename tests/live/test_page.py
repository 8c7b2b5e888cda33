"""The live page in a real Chromium, before the proxy on the real llama-server, with traffic."""

import re
from importlib.resources import files
from typing import Any

import msgspec

from tests.lab.browser import Page, open_page
from tests.lab.conversation import agent_requests, system, tools
from tests.lab.rig import Rig
from tests.live.conftest import StartRig

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"
MESSAGES = agent_requests(2, 1, header=[system(60)])
TOOLS = tools(2)
ROWS = "document.querySelectorAll('#requests tbody tr[data-id]')"


def asked_on(day: str) -> list[dict[str, Any]]:
    told = f"{HOSTILE} It is {day}, a fine day for work. " + "Answer in whole sentences. " * 20
    return [{"role": "system", "content": told}, {"role": "user", "content": "Hello"}]


async def test_page_shows_what_happens_as_it_happens_and_why(start_rig: StartRig) -> None:
    async with start_rig("hybrid") as rig, open_page() as page:
        for messages in (*MESSAGES, asked_on("2026-11-20")):
            await rig.chat(messages, tools=TOOLS, max_tokens=2)
        await rig.settled()
        await page.goto(rig.admin_url + "/")
        await page.until(f"{ROWS}.length === {len(MESSAGES) + 1}")
        await slots_and_sums_are_shown(page)
        await new_request_appears_and_is_explained(rig, page)
        await tree_opens_by_keyboard(page)
        await nothing_is_wider_than_a_phone(page)
        await names_and_contrasts_are_as_they_should_be(page)
        await page_goes_on_when_the_proxy_comes_back(rig, page)
        asked = [url for url in page.requested if not url.startswith(rig.admin_url + "/")]
        assert asked == []


async def slots_and_sums_are_shown(page: Page) -> None:
    assert await page.run("document.querySelector('#state').innerText") == "Caching"
    slots = await page.run("document.querySelector('#slots tbody').innerText")
    assert "Idle" in slots and "tokens" in slots
    figures = await page.run("document.querySelector('#today').innerText")
    assert "Tokens reused" in figures and "3" in figures
    bars = f"[...{ROWS}].map(row => row.querySelector('.bar .reused').style.width)"
    widths = [float(width.rstrip("%")) for width in await page.run(bars)]
    assert widths[-1] == 0 and 50 < max(widths) < 100


async def new_request_appears_and_is_explained(rig: Rig, page: Page) -> None:
    before = await page.run(f"{ROWS}.length")
    await rig.chat(asked_on("2026-11-21"), tools=TOOLS, max_tokens=2)
    await page.until(f"{ROWS}.length === {before} + 1")
    assert "1 new request" in await page.run("document.querySelector('#news').textContent")
    assert await page.run(f"{ROWS}[0].querySelector('button').innerText") == "date"
    await page.run(f"{ROWS}[0].querySelector('button').click()")
    await page.until("document.querySelector('.explanation')")
    told = await page.run("document.querySelector('.explanation').innerText")
    assert "sticky_date" in told and "In the system prompt" in told and HOSTILE in told
    assert await page.run("document.querySelector('.explanation del').innerText") == "20"
    assert await page.run("document.querySelector('.explanation ins').innerText") == "21"
    assert await page.run("document.querySelectorAll('img, main script').length") == 0


async def tree_opens_by_keyboard(page: Page) -> None:
    await page.until("document.querySelector('#tree button')")
    name = await page.run("document.querySelector('#tree button').innerText")
    assert re.match(r"\S+-tiny \([0-9a-f]{8}\)", name)
    await page.run("document.querySelector('#requests-title').focus()")
    for _ in range(100):
        if await page.run("document.activeElement.closest('#tree') !== null"):
            break
        await page.press("Tab")
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert await page.run(outline) == "solid", "the focus can be seen"
    for depth in (1, 2):
        await page.press("Enter")
        await page.until(f"document.querySelector('#tree {'ul ' * depth} li')")
        await page.press("Tab")
    leaf = await page.run("document.querySelector('#tree .leaf').innerText")
    assert "tokens" in leaf and "made" in leaf


async def nothing_is_wider_than_a_phone(page: Page) -> None:
    await page.resize(360, 740)
    # A model may have a long name.
    await page.run("document.querySelector('#tree button').innerText = 'Qwen35_35B_'.repeat(8)")
    wide = "[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > 360)"
    assert await page.run(f"{wide}.map(e => e.outerHTML)") == []
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


async def page_goes_on_when_the_proxy_comes_back(rig: Rig, page: Page) -> None:
    assert page.complaints == []
    port = rig.running.admin_port
    await rig.stop_proxy()
    await page.until("document.querySelector('#connection').className === 'gone'")
    rig.settings = msgspec.structs.replace(rig.settings, admin=f"127.0.0.1:{port}")
    await rig.start_proxy()
    await page.until("document.querySelector('#connection').innerText.startsWith('Live')")
    # What a browser says of connections that were refused is the only thing it may complain of.
    assert [c for c in page.complaints if "net::ERR_" not in c] == []
