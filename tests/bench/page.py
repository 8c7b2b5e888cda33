"""The live page in a real browser: its pictures for the docs, and how long it takes to load.

`make screenshots` writes the pictures. `python -m tests.bench.page load` measures a store of 10,000
checkpoints, filled without llama-server; it prints milliseconds and changes nothing.
"""

import asyncio
import statistics
import tempfile
import zlib
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import click

from proxy.core.model import Family
from proxy.core.tokens import Namespace, hash_prefixes, token_ids
from proxy.log import configure_logging
from proxy.settings import Settings
from proxy.store.catalogue import Limits
from proxy.store.store import CheckpointStore
from tests.lab.browser import Page, open_page
from tests.lab.conversation import agent_requests, system, tools
from tests.lab.models import model_path
from tests.lab.rig import Rig
from tests.lab.running import Running, run_proxy
from tests.lab.server import DEFAULT_MODEL_FOLDER, REPOSITORY, LlamaServer, find_free_port
from tests.store.conftest import new_checkpoint

DOCS = REPOSITORY / "docs"
N_HEADERS, N_OF_SESSION = 20, 5
N_LOADS = 30
_SHOWN = "document.documentElement?.dataset.shown && document.querySelector('#tree li')"
_WATCH = """
new MutationObserver((_, observer) => {
  if (!document.documentElement.dataset.shown || !document.querySelector('#tree li')) return;
  window.shownAfter = performance.now();
  observer.disconnect();
}).observe(document, { attributes: true, childList: true, subtree: true });
"""

_OPEN = """
(async () => {
  const button = [...document.querySelectorAll('#tree button[aria-expanded]')].at(-1);
  const began = performance.now();
  button.click();
  while (!button.closest('li').querySelector('ul li')) await new Promise(requestAnimationFrame);
  return performance.now() - began;
})()
"""


@click.group()
def main() -> None:
    """The live page in a real browser."""
    configure_logging("error", "console")


@main.command()
def screenshots() -> None:
    """Write docs/live-page.png and docs/live-page-phone.png."""
    asyncio.run(_take_screenshots())


@main.command()
@click.option("--checkpoints", default=10_000, show_default=True)
def load(checkpoints: int) -> None:
    """Measure how long the page takes to show a large store."""
    asyncio.run(_measure_load(checkpoints))


async def _take_screenshots() -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "slots"
        directory.mkdir(mode=0o700)
        model = model_path("hybrid", "tiny", DEFAULT_MODEL_FOLDER)
        server = LlamaServer(model, directory, n_ctx=8192, log_path=Path(folder) / "log")
        async with Rig(server, directory) as rig, open_page() as page:
            await _talk(rig)
            await rig.settled()
            await page.goto(rig.admin_url + "/")
            await page.until(_SHOWN)
            await _open(page)
            await _picture(page, "live-page.png", 920, 1)
            await page.prefer(prefers_color_scheme="dark")
            await _picture(page, "live-page-phone.png", 360, 1)


async def _talk(rig: Rig) -> None:
    """Hold two conversations with one header, and one whose system prompt tells the time."""
    header = [system(250)]
    for seed in (1, 50):
        for messages in agent_requests(2, 1, header=header, seed=seed):
            await _stream(rig, messages, tools=tools(4))
    for day, hour in (("Friday", "14:03"), ("Saturday", "09:41")):
        told = (
            f"You are a careful assistant. It is {day}, {hour}. "
            + "Answer in whole sentences. " * 80
        )
        await _stream(
            rig, [{"role": "system", "content": told}, {"role": "user", "content": "Hello"}]
        )


async def _stream(rig: Rig, messages: list[Any], **fields: Any) -> None:
    body = {"messages": messages, "max_tokens": 4, "stream": True, **fields}
    async with rig.client.post(rig.base_url + "/v1/chat/completions", json=body) as reply:
        await reply.read()


async def _open(page: Page) -> None:
    """Open the newest request, and the tree along its first branch."""
    await page.run("document.querySelector('#requests tbody button').click()")
    await page.until("document.querySelector('.explanation')")
    for depth in range(1, 4):
        await page.run("[...document.querySelectorAll('#tree button')].at(-1).click()")
        await page.until(f"document.querySelectorAll('#tree ul li').length >= {depth}")


async def _picture(page: Page, name: str, width: int, scale: float) -> None:
    await page.resize(width, 800, scale)
    await page.resize(width, int(await page.run("document.body.scrollHeight")), scale)
    (DOCS / name).write_bytes(compact(await page.picture()))
    click.echo(f"written: {DOCS / name}")


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
            min_free_bytes=0,
        )
        running = await stack.enter_async_context(run_proxy(settings))
        page = await stack.enter_async_context(open_page())
        assert running.store is not None
        click.echo(f"{len(running.store):,} checkpoints")
        await _load_often(page, running)
        await _open_levels(page)


async def _load_often(page: Page, running: Running) -> None:
    await page.send("Page.addScriptToEvaluateOnNewDocument", source=_WATCH)
    took = []
    for _ in range(N_LOADS):
        await page.goto("about:blank")
        await page.goto(f"http://127.0.0.1:{running.admin_port}/")
        await page.until("window.shownAfter")
        took.append(await page.run("window.shownAfter"))
    _tell("load until everything is shown", took)


async def _open_levels(page: Page) -> None:
    """Open a node of each level, the last one that is shown."""
    for level in ("namespace", "header", "session"):
        took = await page.run(_OPEN)
        click.echo(f"open a {level}: {took:.0f} ms")


def _tell(what: str, took: list[float]) -> None:
    best, middle, worst = min(took), statistics.median(took), max(took)
    click.echo(f"{what}: {best:.0f} ms at best, median {middle:.0f}, worst {worst:.0f}")


def fill(directory: Path, n_checkpoints: int) -> None:
    """Put small checkpoints into a store: headers, sessions of each, states of each session."""
    store = CheckpointStore(directory, Limits(1 << 40))
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
            store._directory.commit(new, tokens, hash_prefixes(namespace, tokens))
    finally:
        store.close()


if __name__ == "__main__":
    main()
