"""`llama-prefix-cache explain`: why a request reused no more of its prompt than it did."""

import asyncio
import os
from pathlib import Path

import aiohttp
import click
import msgspec
from rich.console import Console

from proxy.commands.explanation_text import explanation_text
from proxy.commands.options import EXIT_UNAVAILABLE, EXIT_USAGE, fail
from proxy.config import Settings, merge_settings
from proxy.core.records import Explanation
from proxy.errors import SettingsError
from proxy.sources import ENVIRONMENT_PREFIX
from proxy.upstream.llama_server import new_session

EXIT_NOT_THERE = 1
_SECONDS = 10.0
_ANY_ADDRESS = ("", "0.0.0.0", "[::]")


@click.command()
@click.argument("request_id", default="last", metavar="[REQUEST_ID|last]")
@click.option(
    "--admin", metavar="URL", help=f"Admin listener of the proxy. [http://{Settings.admin}]"
)
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    envvar=ENVIRONMENT_PREFIX + "CONFIG",
    help="The proxy's YAML file, for its `admin`.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def explain(request_id: str, admin: str | None, config: Path | None, as_json: bool) -> None:
    """Say what a request reused, why not more, and what helps.

    REQUEST_ID is the id of its log line; without one it is the last request. Exit status: 0 it is
    explained, 1 there is no such request (any more), 69 no proxy answers.

    \b
    Examples:
      llama-prefix-cache explain
      llama-prefix-cache explain 5f0c1a2b --json
      llama-prefix-cache explain last --admin http://192.168.1.5:8082
    """
    url = _admin_url(admin, config)
    status, body = asyncio.run(_ask(url, f"/requests/{request_id}"))
    if status == 404:
        fail("there is no such request, or it is forgotten", EXIT_NOT_THERE)
    if status != 200:
        fail(f"{url} is not this proxy's admin listener", EXIT_UNAVAILABLE)
    if as_json:
        click.echo(msgspec.json.format(body, indent=2))
        return
    explanation = msgspec.json.decode(body, type=Explanation)
    Console(highlight=False).print(explanation_text(explanation), soft_wrap=True)


def _admin_url(admin: str | None, config: Path | None) -> str:
    given = {"admin": admin.removeprefix("http://").rstrip("/") if admin else None}
    try:
        address: str = merge_settings(given, os.environ, config).get("admin", Settings.admin)
    except SettingsError as error:
        fail(error, EXIT_USAGE)
    host, _, port = address.rpartition(":")
    return f"http://{'127.0.0.1' if host in _ANY_ADDRESS else host}:{port}"


async def _ask(url: str, path: str) -> tuple[int, bytes]:
    timeout = aiohttp.ClientTimeout(total=_SECONDS)
    async with new_session() as session:
        try:
            async with session.get(url + path, timeout=timeout) as reply:
                return reply.status, await reply.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            fail(f"no proxy answers at {url} ({error})", EXIT_UNAVAILABLE)
