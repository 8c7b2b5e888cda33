"""`llama-prefix-cache explain`: why a request reused no more of its prompt than it did."""

from pathlib import Path
from urllib.parse import quote

import click
import msgspec

from proxy.commands.access import admin_option, find_admin
from proxy.commands.explanation_text import explanation_text
from proxy.commands.options import config_option, json_option
from proxy.commands.printing import console
from proxy.core.explaining.records import Explanation


@click.command()
@click.argument("request_id", default="last", metavar="[REQUEST_ID|last|miss]")
@admin_option
@config_option
@json_option
def explain(request_id: str, admin: str | None, config: Path | None, as_json: bool) -> None:
    """Say what a request reused, why not more, and what helps.

    REQUEST_ID is the id of its log line; without one it is the last request, and with `miss` the last one
    that evaluated what was known. Exit status: 0 it is explained, 1 there is no such request (any more),
    69 no proxy answers.

    \b
    Examples:
      llama-prefix-cache explain
      llama-prefix-cache explain miss
      llama-prefix-cache explain 5f0c1a2b --json
      llama-prefix-cache explain last --admin http://192.168.1.5:8082
    """
    listener = find_admin(admin, config)
    body = listener.raw("GET", f"/requests/{quote(request_id, safe='')}")
    explanation = listener.decode(body, Explanation)
    if as_json:
        click.echo(msgspec.json.format(body, indent=2))
    else:
        console().print(explanation_text(explanation), soft_wrap=True)
