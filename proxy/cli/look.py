"""`llama-prefix-cache stats`, `explain`, `config` and `doctor`: the gain of the cache, why a request
missed, the settings in force, and whether caching will work here."""

import asyncio
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
import msgspec
from rich.console import Console, Group, RenderableType
from rich.text import Text

from proxy.cli import command
from proxy.core.rates import seconds_in_words, size_in_words
from proxy.doctor.findings import Finding, Setup, Severity, exit_status, findings_of, summary
from proxy.explain.causes import Cause, PromptPart
from proxy.explain.sketch import Cost, visible
from proxy.explain.views import Explanation, Nearest
from proxy.log import configure_logging
from proxy.settings import NAMES, merge_settings, read_sources, written

# `llama-prefix-cache stats`: the state of the proxy and its llama-servers, and the gain of reuse.


@click.command()
@command.with_proxy
def stats(proxy: command.RunningProxy) -> None:
    """Say how the proxy is doing, what runs, and how much was reused.

    \b
    llama-prefix-cache stats
    llama-prefix-cache stats --json | jq .today.n_reused

    Today began at midnight, or when a proxy first used the directory. `ls` lists the stored checkpoints;
    /metrics has all numbers.
    """
    overview = proxy.overview()
    command.answer(overview, command.table_of(stats_rows(overview)))


def stats_rows(overview: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the facts that the live page shows above its requests, each with its name."""
    since = datetime.fromisoformat(overview["since"]).astimezone()
    yield "the proxy", f"is {overview['state']} since {since:%Y-%m-%d %H:%M}"
    for why in overview["reasons"]:
        yield "", f"{why['reason']} {why['cure']}"
    if store := overview["store"]:
        stored = command.checkpoints_in_words(store["n_checkpoints"], store["size_bytes"])
        yield "stored", f"{stored} of {size_in_words(store['max_bytes'])}"
    for server in overview["servers"]:
        states = Counter(slot["state"] for slot in server["slots"])
        slots = ", ".join(f"{n} {state}" for state, n in sorted(states.items()))
        yield f"llama-server {server['name']}".strip(), f"rule: {server['rule']}; slots: {slots}"
    for request in overview["in_flight"]:
        n_done, n_prompt = request["n_done"], request["n_prompt"]
        done = f", {n_done:,} of {n_prompt:,} tokens" if n_prompt and n_done is not None else ""
        came = command.age_in_words(time.time() - request["at"])
        words = f'"{request["title"]}"' if request["title"] else ""
        named = ", ".join(filter(None, (words, request["client"]))) or request["path"]
        yield "in flight", f"{named}: {request['phase']}{done}, came {came}"
    today = overview["today"]
    yield "today", f"since {datetime.fromtimestamp(today['since']):%Y-%m-%d %H:%M}"
    yield "requests", f"{today['n_requests']:,}, of which {today['n_reusing']:,} were hits"
    share = f"{today['n_reused'] / max(1, today['n_prompt']):.0%}"
    yield "prompt tokens", f"{today['n_prompt']:,}, of which {today['n_reused']:,} reused ({share})"
    yield "restored", f"{today['n_restored']:,} of the reused tokens; the others were in slots"
    missed = f"{today['n_missed']:,} known tokens, in {today['n_missing']:,} of the requests"
    yield "missed", f"{missed}: `explain miss` says why" if today["n_missing"] else "nothing"
    # A few short restores may have taken longer than evaluating: nothing is saved yet.
    saved = today["saved_seconds"]
    told = f"{seconds_in_words(saved)} of evaluation, by all reused tokens"
    yield "time saved", told if saved > 0 else "nothing yet"


# An explanation for people, with the changes in colour.


_COLOURS = {"hit": "green", "partial": "yellow", "miss": "red", "unanswered": "red"}
_PARTS = {
    PromptPart.TOOLS: "in the tools",
    PromptPart.SYSTEM: "in the system prompt",
    PromptPart.USER: "in a message of the user",
    PromptPart.ASSISTANT: "in an answer of the model",
    PromptPart.TOOL_RESULT: "in a tool's result",
    PromptPart.TEXT: "in the text",
}


def explanation_text(explanation: Explanation) -> Text:
    """Return an explanation for a terminal."""
    request = explanation.request
    by = f"  by {_visible(request.server)}" if request.server else ""
    # The cause decides: a miss may have reused something, and a first sight is no miss. A request that has
    # reused all of the few tokens that its conversation had is a hit, too.
    others = {Cause.FIRST_SIGHT: "new", Cause.REFUSED: f"refused (status {request.status})"}
    named = "miss" if request.cause.is_miss else others.get(request.cause, request.outcome)
    named = "hit" if (named, request.cause) == ("miss", Cause.HIT) else named
    outcome = named, f"bold {_COLOURS.get(named, 'default')}"
    kind = f"  {request.kind.value}" if request.kind else ""
    lines = [Text.assemble(outcome, f"  {request.id}  {request.path}{by}{kind}")]
    first_words = f'"{request.title}"' if request.title else ""
    asked_by = ", ".join(filter(None, (first_words, request.client, request.model)))
    at = f"{datetime.fromtimestamp(request.at):%Y-%m-%d %H:%M:%S}"
    lines.append(Text(f"{_visible(asked_by or f'conversation {request.conversation}')}, {at}"))
    if request.n_prompt is not None and request.confirmed is not None:
        reuse = f"{request.confirmed:,} of {request.n_prompt:,} tokens reused"
        if request.n_missed:
            reuse += f", {request.n_missed:,} evaluated again"
        if (request.saved_seconds or 0) >= 0.0005:
            reuse += f"; {seconds_in_words(request.saved_seconds or 0)} saved"
        lines.append(Text(reuse))
    if request.why:
        shared = f"; shared store: {request.shared}" if request.shared else ""
        plan = f"plan: {request.chosen or 'none'}, {request.why}{shared}"
        plan = f"error: {request.why}" if request.cause is Cause.REFUSED else plan
        lines.append(Text(_visible(plan), style="dim"))
    place = ""
    if request.cause is not Cause.HIT and request.part is not PromptPart.NOWHERE:
        number = "" if request.message is None else f" (message {request.message})"
        place = f", {_PARTS[request.part]}{number}"
    cause = Text.assemble((f"cause: {request.cause.value}", "bold"), place)
    lines += [Text(), cause, Text(explanation.says)]
    if request.cause.is_miss:
        lines.append(Text.assemble(("cure: ", "bold"), explanation.cure))
    if explanation.nearest is not None:
        lines.append(Text(f"nearest: {_nearest(explanation.nearest)} in common", style="dim"))
    if (differs := explanation.divergence) and (differs.known or differs.now):
        before, known, now = map(_visible, (differs.before, differs.known, differs.now))
        lines += [Text(), Text("  ..." + before, style="dim")]
        lines += [Text(f"- {known}", style="red"), Text(f"+ {now}", style="green")]
    if explanation.costs:
        lines += [Text(), *_costs(explanation.costs)]
    return Text("\n").join(lines)


def _nearest(nearest: Nearest) -> str:
    if nearest.id is None:
        return f"a kept state, {nearest.n_common:,} tokens"
    age, n_tokens = f"{nearest.age_seconds or 0:,.0f} s before", nearest.n_tokens or 0
    return f"request {nearest.id}, {age}, {nearest.n_common:,} of its {n_tokens:,} tokens"


_N_LARGEST = 12


def _costs(costs: Sequence[Cost]) -> Iterator[Text]:
    """Yield the cost of each kind of prompt part, and the largest parts."""
    sums, counts = Counter[PromptPart](), Counter(cost.part for cost in costs)
    for cost in costs:
        sums[cost.part] += cost.n_tokens
    parts = (f"{part.value} {sums[part]:,} ({counts[part]})" for part, _ in sums.most_common())
    yield Text("about, in tokens: " + ", ".join(parts), style="bold")
    for cost in sorted(costs, key=lambda cost: -cost.n_tokens)[:_N_LARGEST]:
        name = _visible(cost.name) or f"message {cost.message}" * (cost.message is not None)
        yield Text.assemble(
            f"{cost.n_tokens:>8,}  {cost.part.value} {name}",
            ("  changed or new" * cost.is_changed, "yellow"),
        )


def _visible(text: str) -> str:
    """Return a text on one line, without control characters."""
    return visible(text.replace("\n", "⏎"))


# `llama-prefix-cache explain`: why a request did not reuse more of its prompt.


@click.command()
@click.argument("request_id", default="last", metavar="[REQUEST_ID|last|miss]")
@command.with_proxy
def explain(proxy: command.RunningProxy, request_id: str) -> None:
    """Say what a request reused, why not more, and what helps.

    REQUEST_ID is the id of its log line; without one it is the last request, and with `miss` the last one
    that evaluated what was known. Exit status: 0 it is explained, 1 there is no such request (any more),
    69 no proxy answers.

    \b
    Examples:
      llama-prefix-cache explain
      llama-prefix-cache explain miss
      llama-prefix-cache explain 5f0c1a2b --json
      llama-prefix-cache explain last --admin 192.168.1.5:8082
    """
    explanation = proxy.ask("GET", f"/requests/{quote(request_id, safe='')}", Explanation)
    command.answer(explanation, explanation_text(explanation))


# `llama-prefix-cache config`: the settings in force, and the source of each.


@click.command("config")
@command.setting_options()
@command.json_option
def config_(config: Path | None, **flags: Any) -> None:
    """Print the settings in force, and where each value comes from.

    \b
    llama-prefix-cache config
    llama-prefix-cache config --config /etc/llama-prefix-cache/config.yaml

    Flags beat the environment (LLAMA_PREFIX_CACHE_*), which beats the file, which beats the defaults. A
    proxy that runs has read them at its start. Keys are not printed.
    """
    settings = command.settings_of(flags, config, "any")
    sources = read_sources(flags, os.environ, config)
    origins = {"slot_save_path": "default of run and doctor"}  # serve needs one
    origins |= {name: source for source, values in sources.items() for name in values}
    rows = []
    for name in NAMES:
        value = written(name, getattr(settings, name))
        is_hidden = name.endswith("_key") and value != "null"
        rows.append((name, "(not shown)" if is_hidden else value, origins.get(name, "default")))
    content = {name: {"value": value, "from": origin} for name, value, origin in rows}
    command.answer(content, command.table_of(rows))


# `llama-prefix-cache doctor`: whether caching will work here, how well, and what mends it.


_SHOWN = {
    Severity.OK: ("ok", "green"),
    Severity.LIMIT: ("limit", "yellow"),
    Severity.BLOCKER: ("STOP", "bold red"),
}


@click.command()
@command.setting_options(
    *("upstream", "slot_save_path", "upstream_api_key"),
    *("admin", "admin_token_file", "max_store_bytes"),
)
@click.option("--model", metavar="NAME", help="At a router or llama-swap: examine only this model.")
@command.json_option
def doctor(config: Path | None, model: str | None, **flags: Any) -> None:
    """Say whether caching will work here, how well, and what mends it.

    \b
    llama-prefix-cache doctor --upstream http://127.0.0.1:8080 --slot-save-path ~/slots
    llama-prefix-cache doctor --model qwen3 --slot-save-path ~/slots     at a router or llama-swap

    doctor takes the settings of `serve`: the same flags, variables and configuration file. The default
    directory is that of `run`. If a proxy uses the directory, or runs and no directory is given, doctor
    asks that proxy for its /health and touches no llama-server. Otherwise doctor examines every
    llama-server of the upstream. Probes run in empty slots and leave nothing behind. At a router or
    llama-swap, doctor examines the loaded models, or only the model of --model, which is loaded if
    necessary: the host may unload another model for it. Exit status: 0 caching will work, 1 it will work
    with limits, 2 it will not work.
    """
    # Half a proxy: other commands start sooner without it.
    from proxy.doctor.examination import examine

    is_default = "slot_save_path" not in merge_settings(flags, os.environ, config)
    settings = command.settings_of(flags, config, "any" if is_default else "given")
    configure_logging("critical", "console")  # the report says what an attach would log
    setup = _until_interrupted(examine(settings, model=model or "", is_default=is_default))
    command.answer(json_report(setup), report(setup))
    sys.exit(exit_status(findings_of(setup)))


def _until_interrupted(examination: Coroutine[Any, Any, Setup]) -> Setup:
    """Return the result; Ctrl-C and SIGTERM end the examination, and its probes are cleaned up."""

    async def run() -> Setup:
        if (task := asyncio.current_task()) is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        said = "attaching, and trying out states of up to 4,400 tokens"
        with Console(stderr=True).status(said):  # shows it on a terminal only
            return await examination

    try:
        return asyncio.run(run())
    except (KeyboardInterrupt, asyncio.CancelledError):
        command.fail("interrupted; the probes are cleaned up", command.Exit.CUT_SHORT)


def report(setup: Setup) -> Group:
    """Return the verdict and every finding with its cure."""
    findings = findings_of(setup)
    has_headings = any(finding.about for finding in findings)
    n_columns = max(len(finding.topic) for finding in findings)
    lines: list[RenderableType] = [Text(summary(setup), _SHOWN[exit_status(findings)][1])]
    for about, group in groupby(findings, key=lambda finding: finding.about):
        lines.append(Text())
        if has_headings:
            lines.append(Text(_visible(about or "all"), style="bold underline"))
        lines.append(command.table_of(_row(finding, n_columns) for finding in group))
    return Group(*lines)


def _row(finding: Finding, n_columns: int) -> list[Text]:
    mark, style = _SHOWN[finding.severity]
    body = Text(command.visible_lines(finding.text))
    if finding.cure:
        body.append(f"\n-> {finding.cure}", style="bold")
    topic = Text(finding.topic.ljust(n_columns), no_wrap=True)
    return [Text(mark.ljust(5), style=style, no_wrap=True), topic, body]


def json_report(setup: Setup) -> dict[str, object]:
    """Return the report for programs: verdict, exit status, findings and facts."""
    findings = findings_of(setup)
    return {
        "verdict": summary(setup),
        "exit_status": exit_status(findings),
        "findings": [
            {**msgspec.to_builtins(each), "severity": each.severity.name.lower()}
            for each in findings
        ],
        "facts": setup,
    }
