"""`llama-prefix-cache warm`: a header is evaluated and kept before the first user needs it."""

import asyncio
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from proxy.commands.access import admin_option, find_admin
from proxy.commands.admin import Admin
from proxy.commands.options import EXIT_FAILED, config_option, fail, json_option
from proxy.commands.printing import print_json
from proxy.commands.words import size_in_words
from proxy.core.degradation import EXPLANATIONS

_LOOK_SECONDS = 0.5
_PASSING = frozenset(kind.value for kind, told in EXPLANATIONS.items() if told.is_passing)


class _Reason(msgspec.Struct):
    kind: str


class _Health(msgspec.Struct):
    reasons: list[_Reason]


@click.command()
@click.argument("file", type=click.File("rb"), required=False)
@click.option(
    "--from-request",
    "request_id",
    metavar="ID|last",
    help="In place of FILE: a request that was answered not long ago, by the id of its log line.",
)
@click.option("--whole", is_flag=True, help="The whole prompt, not only tools and system prompt.")
@click.option(
    "--model", metavar="NAME", help="Where there are several: the model, in place of FILE's own."
)
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
    request_id: str | None,
    whole: bool,
    model: str | None,
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
    llama-prefix-cache warm --model qwen3 first-request.json     before a router or llama-swap
    llama-prefix-cache warm --from-request last

    FILE is a request's body as JSON, as a client sends it to any of the cached APIs. Kept are tools and
    system prompt; the messages behind them are left out, unless --whole. The proxy must be running. Before
    a router or llama-swap the body says which model it is for, and that one is loaded.

    --from-request needs no body: the proxy remembers the tokens of its last requests, unless explain_keep
    is none. Their state is kept for whoever sent them.
    """
    if (file is None) == (request_id is None):
        raise click.UsageError("give either FILE or --from-request")
    if request_id is not None and (path is not None or model is not None):
        raise click.UsageError("--path and --model are for FILE")
    given = {"path": path, "whole": "1" if whole else None, "request": request_id}
    query = {name: value for name, value in given.items() if value}
    listener = find_admin(admin, config)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    body = for_model(file.read(), model) if file else b""
    last = asyncio.run(_warm(listener, body, query, headers))
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


def for_model(body: bytes, model: str | None) -> bytes:
    """Return a request's body with another model in it; one that is no body is the proxy's to refuse."""
    if model is None:
        return body
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return body
    return msgspec.json.encode({**fields, "model": model})


async def _warm(
    admin: Admin, body: bytes, query: dict[str, str], headers: dict[str, str]
) -> dict[str, Any]:
    """Have a body warmed; return the last thing that was said.

    A model that was just loaded for it may have to be examined first: that is waited for.
    """
    while True:
        last = await _follow(admin, body, query, headers)
        if "warmed" in last or not await _is_being_examined(admin):
            return last
        await asyncio.sleep(_LOOK_SECONDS)


async def _is_being_examined(admin: Admin) -> bool:
    """Return whether what keeps requests from being cached ends by itself."""
    health = await admin.ask_async("/health", _Health)
    return any(reason.kind in _PASSING for reason in health.reasons)


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
