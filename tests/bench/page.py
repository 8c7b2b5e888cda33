"""The live page in a real browser: its pictures for the docs, and how long it takes to load.

`make screenshots` writes the pictures. `python -m tests.bench.page load` measures a store of 10,000
checkpoints, filled without llama-server; it prints milliseconds and changes nothing.
"""

import asyncio
import random
import statistics
import tempfile
import time
import zlib
from contextlib import AsyncExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import click

from proxy.core.model import Family
from proxy.core.tokens import Namespace, hash_prefixes, token_ids
from proxy.explain.causes import Cause
from proxy.explain.views import History, RequestRecord, Today
from proxy.log import configure_logging
from proxy.settings import Settings
from proxy.store.store import CheckpointStore
from tests.lab.browser import Page, open_page
from tests.lab.conversation import prose, system, tool_call, tool_result, tools
from tests.lab.models import model_path
from tests.lab.rig import Rig
from tests.lab.running import Running, run_proxy
from tests.lab.server import DEFAULT_MODEL_FOLDER, REPOSITORY, LlamaServer, find_free_port
from tests.store.conftest import new_checkpoint

PICTURES = REPOSITORY / "docs"
N_HEADERS, N_OF_SESSION = 20, 5
N_LOADS = 30
_SHOWN = "document.documentElement?.dataset.shown && document.querySelector('#map .cell')"
_WATCH = """
new MutationObserver((_, observer) => {
  if (!document.documentElement.dataset.shown || !document.querySelector('#map .cell')) return;
  window.shownAfter = performance.now();
  observer.disconnect();
}).observe(document, { attributes: true, childList: true, subtree: true });
"""

_OPEN = """
(async () => {
  const began = performance.now();
  document.querySelector('#map .cell').click();
  while (!document.querySelector('#states li')) await new Promise(requestAnimationFrame);
  return performance.now() - began;
})()
"""


@click.group()
def main() -> None:
    """The live page in a real browser."""
    configure_logging("error", "console")


@main.command()
def screenshots() -> None:
    """Write docs/live-page*.png."""
    asyncio.run(_take_screenshots())


@main.command()
@click.option("--checkpoints", default=10_000, show_default=True)
def load(checkpoints: int) -> None:
    """Measure how long the page takes to show a large store."""
    asyncio.run(_measure_load(checkpoints))


CLAUDE_CODE = "claude-cli/2.1.329 (external, cli)"
OPENCODE = "opencode/1.18.33 ai-sdk/provider-utils/4.0.23 runtime/bun/1.3.14"
TASKS = (
    (CLAUDE_CODE, "The login test fails on Tuesdays only. Find out why and mend it", 6),
    (OPENCODE, "Add a --json flag to the list command", 5),
    (CLAUDE_CODE, "Write release notes from the commits since 2.3", 3),
    (OPENCODE, "Why is the importer so slow with large files?", 4),
    (CLAUDE_CODE, "Rename Desk to Queue everywhere, the docs too", 2),
)
_PARTS = {
    "history": ".columns.strip",
    "now": "#flights",
    "miss": "#requests",
    "conversation": "#turns",
    "store": "#map",
}


async def _take_screenshots() -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "slots"
        directory.mkdir(mode=0o700)
        model = model_path("hybrid", "small", DEFAULT_MODEL_FOLDER)
        server = LlamaServer(model, directory, n_ctx=16384, log_path=Path(folder) / "log")
        listen = f"127.0.0.1:{find_free_port()}"
        async with Rig(server, directory, listen=listen) as rig, open_page() as page:
            await page.goto(rig.admin_url + "/")
            await page.until("!document.querySelector('#welcome').hidden")
            await _picture(page, "live-page-welcome.png", 1040)
            _remember_a_month(rig.running.shared.journal.past)
            await _talk(rig)
            await rig.settled()
            await page.goto(rig.admin_url + "/")
            await page.until(_SHOWN)
            await _pictures_of_parts(page)
            running = [asyncio.ensure_future(_ask(rig, number)) for number in range(3)]
            await page.until("document.querySelectorAll('#flights .bar').length > 1")
            done = "[...document.querySelectorAll('#flights .done')]"
            await page.until(f"{done}.some(part => parseFloat(part.style.width) > 5)")
            await _picture(page, "live-page-now.png", 1040, "now")
            await _picture(page, "live-page.png", 1040)
            await page.prefer(prefers_color_scheme="dark")
            await _picture(page, "live-page-dark.png", 1040)
            await _picture(page, "live-page-phone.png", 360)
            for each in running:
                each.cancel()
            await asyncio.gather(*running, return_exceptions=True)


def _remember_a_month(history: History) -> None:
    """Let the proxy remember days of work that nobody did: a picture needs a month."""
    chance, now = random.Random(4), time.time()
    for hours_ago in range(29 * 24, 0, -1):
        at = datetime.fromtimestamp(now - 3600 * hours_ago)
        if at.weekday() < 5 and 8 <= at.hour < 19 and chance.random() < 0.8:
            for _ in range(chance.randrange(2, 12)):
                history.add(_worked(at.timestamp(), chance))
    history.today = Today(since=now - 5 * 3600)
    history.minutes.clear()  # the clock never goes back: earlier minutes would count for the last one
    for seconds_ago in range(7200, 240, -60):
        busy = chance.random() < (0.75 if 5000 > seconds_ago > 2600 or seconds_ago < 1500 else 0.2)
        for _ in range(chance.randrange(1, 4) if busy else 0):
            history.add(_worked(now - seconds_ago, chance))


def _worked(at: float, chance: random.Random) -> RequestRecord:
    n_prompt = chance.randrange(9_000, 60_000)
    is_miss = chance.random() < 0.06
    n_new = chance.randrange(200, 2_500)
    n_missed = chance.randrange(2_000, n_prompt - n_new) if is_miss else 0
    n_reused = n_prompt - n_new - n_missed
    return RequestRecord(
        id="",
        at=at,
        path="/v1/messages",
        outcome="hit",
        cause=Cause.DATE if is_miss else Cause.HIT,
        seconds=1.0,
        n_prompt=n_prompt,
        confirmed=n_reused,
        n_missed=n_missed,
        chosen=chance.choice(("live", "live", "restore")),
        saved_seconds=n_reused / 900,
        evaluation_seconds=(n_prompt - n_reused) / 900,
    )


async def _talk(rig: Rig) -> None:
    """Hold conversations of two clients, and one whose system prompt tells the time."""
    for number, (client, task, n_requests) in enumerate(reversed(TASKS)):
        of_claude = client == CLAUDE_CODE
        header, known = system(500 if of_claude else 250, seed=7 + of_claude), tools(4 + of_claude)
        messages: list[Any] = [header, {"role": "user", "content": task}]
        for turn in range(n_requests):
            await _stream(rig, client, messages, tools=known)
            messages += [tool_call(100 * number + turn), tool_result(100 * number + turn, 70)]
    for day, hour in (("Friday", "14:03"), ("Saturday", "09:41")):
        told = (
            f"You are a careful assistant. It is {day}, {hour}. "
            + "Answer in whole sentences. " * 80
        )
        question = {"role": "user", "content": "What is left to do this week?"}
        messages = [{"role": "system", "content": told}, question]
        await _stream(rig, "OpenAI/Python 2.7.1", messages)


async def _ask(rig: Rig, number: int) -> None:
    """Ask something long, so that the page shows it in flight."""
    client, task, _ = TASKS[number]
    messages = [
        system(500 if client == CLAUDE_CODE else 250, seed=7 + (client == CLAUDE_CODE)),
        {"role": "user", "content": f"{task}\n{prose(90 + number, 800)}"},
    ]
    known = tools(4 + (client == CLAUDE_CODE))
    await _stream(rig, client, messages, tools=known, max_tokens=600)


async def _stream(rig: Rig, client: str, messages: list[Any], **fields: Any) -> None:
    body = {"messages": messages, "max_tokens": 4, "stream": True, "model": "qwen3.5-35b", **fields}
    url, headers = rig.base_url + "/v1/chat/completions", {"User-Agent": client}
    async with rig.client.post(url, json=body, headers=headers) as reply:
        await reply.read()


async def _pictures_of_parts(page: Page) -> None:
    await page.run("document.querySelector('#period [data-name=days]').click()")
    await page.until("document.querySelectorAll('#history .stack').length === 30")
    await _picture(page, "live-page-history.png", 1040, "history")
    await page.run("document.querySelector('#period [data-name=hours]').click()")
    await page.run("document.querySelector('#which [data-name=misses]').click()")
    await page.until("document.querySelectorAll('#requests [data-id]').length === 1")
    await page.run("document.querySelector('#requests .miss').click()")
    await page.until("document.querySelector('.explanation')")
    await _picture(page, "live-page-miss.png", 1040, "miss")
    await page.run("document.querySelector('#which [data-name=all]').click()")
    found = (
        "[...document.querySelectorAll('#requests .title')].find(e => /login/.test(e.innerText))"
    )
    await page.until(found)
    await page.run(f"{found}.click()")
    await page.until("document.querySelectorAll('#turns .stack').length > 3")
    await _picture(page, "live-page-conversation.png", 1040, "conversation")
    await page.run("document.querySelector('#every-conversation').click()")
    await page.until("document.querySelector('#turns').hidden")
    await page.run("document.querySelector('#map .cell').click()")
    await page.until("document.querySelector('#states li')")
    await _picture(page, "live-page-store.png", 1040, "store")
    watts = "document.querySelector('.figure input')"
    await page.run(f"({watts}.value = 350, {watts}.dispatchEvent(new Event('input')))")
    await page.run("document.activeElement.blur()")


async def _picture(page: Page, name: str, width: int, part: str = "") -> None:
    """Write a picture of the whole page, or of the section of a *part*."""
    await page.resize(width, 800)
    shown = (
        f"document.querySelector('{_PARTS[part]}').closest('section')" if part else "document.body"
    )
    await page.run("new Promise(requestAnimationFrame)")
    height = int(await page.run(f"{shown}.getBoundingClientRect().height")) + (24 if part else 0)
    await page.resize(width, height)
    await page.run(f"window.scrollTo(0, {shown}.getBoundingClientRect().y + scrollY - 12)")
    await page.run("new Promise(requestAnimationFrame)")
    (PICTURES / name).write_bytes(compact(await page.picture()))
    click.echo(f"written: {PICTURES / name}")


def compact(png: bytes) -> bytes:
    """Return the same picture in fewer bytes: browsers compress in a hurry."""
    parts, pixels, at = [png[:8]], b"", 8
    while at < len(png):
        size, kind = int.from_bytes(png[at : at + 4]), png[at + 4 : at + 8]
        if kind == b"IDAT":
            pixels += png[at + 8 : at + 8 + size]
        elif kind == b"IEND":
            parts.append(_chunk(b"IDAT", zlib.compress(zlib.decompress(pixels), 9)))
        if kind in (b"IHDR", b"IEND"):
            parts.append(png[at : at + 12 + size])
        at += 12 + size
    return b"".join(parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    checksum = zlib.crc32(kind + data)
    return len(data).to_bytes(4) + kind + data + checksum.to_bytes(4)


async def _measure_load(n_checkpoints: int) -> None:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        await asyncio.to_thread(fill, folder, n_checkpoints)
        settings = Settings(
            upstream=f"http://127.0.0.1:{find_free_port()}",
            slot_save_path=str(folder),
            listen="127.0.0.1:0",
            admin="127.0.0.1:0",
        )
        running = await stack.enter_async_context(run_proxy(settings))
        page = await stack.enter_async_context(open_page())
        assert running.store is not None
        click.echo(f"{len(running.store):,} checkpoints")
        await _load_often(page, running)
        await _open_session(page)
        await _lateness(running)


async def _load_often(page: Page, running: Running) -> None:
    await page.send("Page.addScriptToEvaluateOnNewDocument", source=_WATCH)
    took = []
    for _ in range(N_LOADS):
        await page.goto("about:blank")
        await page.goto(f"http://127.0.0.1:{running.admin_port}/")
        await page.until("window.shownAfter")
        took.append(await page.run("window.shownAfter"))
    _tell("load until everything is shown", took)


async def _open_session(page: Page) -> None:
    took = await page.run(_OPEN)
    click.echo(f"open a conversation: {took:.0f} ms")


async def _lateness(running: Running) -> None:
    """Say how much later a timer comes while all records are read: so much a request waits."""
    url = f"http://127.0.0.1:{running.admin_port}"
    async with aiohttp.ClientSession() as client:
        for path in ("/tree", "/checkpoints?under=" + "00" * 16):
            late, began = list[float](), time.perf_counter()
            asking = asyncio.ensure_future(client.get(url + path))
            while not asking.done():
                before = time.perf_counter()
                await asyncio.sleep(0)
                late.append(time.perf_counter() - before)
            whole = time.perf_counter() - began
            click.echo(
                f"{path[:16]}: {whole:.2f} s, nobody waits longer than {1000 * max(late):.0f} ms"
            )


def _tell(what: str, took: list[float]) -> None:
    best, middle, worst = min(took), statistics.median(took), max(took)
    click.echo(f"{what}: {best:.0f} ms at best, median {middle:.0f}, worst {worst:.0f}")


def fill(directory: Path, n_checkpoints: int) -> None:
    """Put small checkpoints into a store: headers, sessions of each, states of each session."""
    store = CheckpointStore(directory, 1 << 40)
    namespace = Namespace(b"n" * 16)
    try:
        for i in range(n_checkpoints):
            session = i // N_OF_SESSION
            header = session % N_HEADERS
            tokens = token_ids(
                [header] * 64 + [session] * 64 + list(range(8 * (i % N_OF_SESSION + 1)))
            )
            name = store.files.new_temporary_name()
            (directory / name).write_bytes(b"state")
            facts = {"restore_points": (64,), "header": 64, "namespace": namespace}
            facts["family"] = Family(header + 1, session + 1)
            new = new_checkpoint(store, name, tokens, [5], **facts)
            store._directory.commit((new, tokens, hash_prefixes(namespace, tokens)))
    finally:
        store.close()


if __name__ == "__main__":
    main()
