"""`llama-prefix-cache warm`: a header is evaluated and kept before the first user needs it."""

import asyncio
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from proxy.commands.access import admin_option, find_admin
from proxy.commands.admin import Admin
from proxy.commands.options import EXIT_FAILED, config_option, fail, json_option
from proxy.commands.printing import print_json
from proxy.commands.words import size_in_words


@click.command()
@click.argument("file", type=click.File("rb"))
@click.option("--whole", is_flag=True, help="The whole prompt, not only tools and system prompt.")
@click.option("--path", help="API that the body is for, such as /v1/messages. [by what it has]")
@click.option(
    "--api-key",
    envvar="LLAMA_API_KEY",
    help="The key of those who will use it: each has its own states.",
)
@click.option("--pin", is_flag=True, help="Keep it whatever the budget says.")
@admin_option
@config_option
@json_option
def warm(
    file: Any,
    whole: bool,
    path: str | None,
    api_key: str | None,
    pin: bool,
    admin: str | None,
    config: Path | None,
    as_json: bool,
) -> None:
    """Evaluate and keep a header for its first user.

    \b
    llama-prefix-cache warm first-request.json
    llama-prefix-cache warm --pin --whole first-request.json
    jq '.body' captured.json | llama-prefix-cache warm -

    FILE is a request's body as JSON, as a client sends it to any of the cached APIs. Kept are tools and
    system prompt; the messages behind them are left out, unless --whole. The proxy must be running.
    """
    query = {
        name: value for name, value in (("path", path), ("whole", "1" if whole else None)) if value
    }
    listener = find_admin(admin, config)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    last = asyncio.run(_follow(listener, file.read(), query, headers))
    if "warmed" not in last:
        fail(last.get("error", "the proxy went away"), EXIT_FAILED)
    warmed = last["warmed"]
    if pin:
        listener.raw("PUT", f"/checkpoints/{warmed['id']}/pin")
    if as_json:
        print_json({**warmed, "is_pinned": pin})
        return
    how = "were kept already" if warmed["was_kept"] else f"took {warmed['seconds']:.1f} s"
    click.echo(
        f"{warmed['n_usable']:,} of {warmed['n_prompt_tokens']:,} tokens are in {warmed['id'][:8]} "
        f"({size_in_words(warmed['size_bytes'])}{', pinned' if pin else ''}): they {how}"
    )


async def _follow(
    admin: Admin, body: bytes, query: dict[str, str], headers: dict[str, str]
) -> dict[str, Any]:
    """Have a body warmed, showing progress on a terminal; return the last thing that was said."""
    last: dict[str, Any] = {}
    shown = Console(stderr=True)
    columns = (TextColumn("evaluating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=shown, disable=not shown.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=None)

        def on_line(line: dict[str, Any]) -> None:
            last.clear()
            last.update(line)
            if "n_done" in line:
                bar.update(task, completed=line["n_done"], total=line["n_tokens"])

        await admin.follow("/warm", body, query, headers, on_line)
    return last
