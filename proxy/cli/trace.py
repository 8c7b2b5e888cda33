"""`llama-prefix-cache trace` and `bench`: traces, which are requests without their texts.

`trace` exports, shows and replays a trace. `bench` replays a trace that it makes, and writes the figures of
this machine into a file for the project.
"""

import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice, pairwise, product, takewhile
from keyword import kwlist
from pathlib import Path
from statistics import median
from typing import Any

import click
import msgspec
from xxhash import xxh3_64_intdigest

from proxy.cli import command
from proxy.cli.command import RunningProxy
from proxy.core.rates import seconds_in_words
from proxy.explain.views import MOST_SECONDS, TRACED_TOKENS, TracedRequest

_file = click.argument("file", type=command.FILE)


@click.group()
def trace() -> None:
    """Export requests without their texts, look at them, replay them."""


@trace.command("export")
@click.argument("file", type=command.FILE, callback=command.agree_to_write)
@command.yes_option
@command.with_proxy
def export(proxy: RunningProxy, file: Path) -> None:
    """Write the last requests into FILE, without any text.

    \b
    llama-prefix-cache trace export trace.jsonl

    Up to 2,000 requests since the proxy was started, in the format of Mooncake's traces: the second of each
    request, counted from the first one, the lengths of prompt and answer in tokens, and a number for each
    512 tokens of the prompt. Numbers count up as blocks appear: two prompts with the same number are the
    same up to there, and no number can be compared with a text or another trace. A reader of the file
    learns when and how much you work, how your conversations fork, and maybe, from the length of the system
    prompt, your client. Requests whose prompts were not read are left out: with explain_keep none, these
    are all requests.
    """
    exported = proxy.ask("GET", "/trace", dict[str, list[TracedRequest]])["requests"]
    if not exported:
        command.fail(f"{file} was not written: no prompt was read since the proxy was started")
    file.write_bytes(msgspec.json.Encoder().encode_lines(exported))
    tell(trace_in_words(_read(file)))


@trace.command("show")
@_file
@command.json_option
def show(file: Path) -> None:
    """Say what FILE reveals, before you give it away.

    A file with anything else in it is refused.
    """
    tell(trace_in_words(_read(file)))


def _read(file: Path) -> list[TracedRequest]:
    try:
        read = msgspec.json.Decoder(TracedRequest).decode_lines(file.read_bytes())
    except ValueError:
        command.fail(f"{file} is not what `trace export` writes", command.Exit.USAGE)
    return read or command.fail(f"there is no request in {file}")


def tell(facts: Mapping[str, object]) -> None:
    """Print facts, a line for each."""
    command.answer(facts, command.table_of((name, str(fact)) for name, fact in facts.items()))


@trace.command("replay")
@_file
@click.argument("url")
@click.option("--speed", default=1, type=click.FloatRange(0), help="Times as fast; 0: no wait. [1]")
@click.option("--model", default="", help="The model to ask, if URL has several.")
@click.option("--api-key", envvar="LLAMA_API_KEY", default="none", help="llama-server's API key.")
@command.json_option
def replay(file: Path, url: str, speed: float, model: str, api_key: str) -> None:
    """Send the requests of FILE to URL, and say how much was reused.

    \b
    llama-prefix-cache trace replay trace.jsonl http://127.0.0.1:8081
    llama-prefix-cache trace replay trace.jsonl http://127.0.0.1:8080 --speed 10

    URL is a proxy, llama-server, or any server with /v1/completions that counts cached tokens in its usage.
    Prompts are made up: blocks with equal numbers are equal texts, of about 512 tokens of this model.
    Requests are sent at their times, whether or not earlier answers have come; with --speed 0 one after the
    other.
    """
    tell(send_all(_read(file), RunningProxy(url, api_key, is_admin=False), model, speed))


_N_AT_ONCE, _ERRORS = 64, range(400, 600)
_Sent = tuple[int, int, float]
"""Prompt tokens, the reused ones among them, and the seconds until the first token of the answer."""


def send_all(
    trace: Sequence[TracedRequest], server: RunningProxy, model: str, speed: float = 0.0
) -> dict[str, float]:
    """Send the requests of a trace to any server; return the figures, beside the share that can be reused.

    Exits if the server does not answer, or counts no tokens.
    """
    # Enough words to measure how many tokens a word has.
    probe = TracedRequest(0, 1024, 1, (-1, -2))
    if (tried := _send(server, model, words_for(probe, {}, 1.0), 1, refusals=())) is None:
        why = f"{server.url} gives no answer that counts its tokens"
        command.fail(why, command.Exit.UNAVAILABLE)
    text_of, words_per_token = texts_of(trace), probe.input_length / tried[0]
    began = time.monotonic()

    def when_due() -> Iterator[TracedRequest]:
        for request in trace:
            due = began + request.timestamp / 1000 / speed if speed else 0.0
            # Here and not in the pool's threads, for which Ctrl-C would wait.
            time.sleep(min(max(0.0, due - time.monotonic()), MOST_SECONDS))
            yield request

    def send(request: TracedRequest) -> _Sent | None:
        text = words_for(request, text_of, words_per_token)
        return _send(server, model, text, request.output_length)

    with ThreadPoolExecutor(_N_AT_ONCE if speed else 1) as pool:
        told = list(pool.map(send, when_due()))
    sent = [each for each in told if each]
    answered = (request for request, each in zip(trace, told, strict=True) if each)
    n_prompt, n_reused = sum(n for n, _, _ in sent), sum(n for _, n, _ in sent)
    seconds = sorted(seconds for *_, seconds in sent) or [0.0]
    return {
        "requests": len(trace),
        "failed": len(trace) - len(sent),
        "prompt tokens": n_prompt,
        "evaluated": n_prompt - n_reused,
        "share reused": round(n_reused / max(1, n_prompt), 4),
        "share in known blocks": round(share_known(answered), 4),
        "first token p50, seconds": round(seconds[len(seconds) // 2], 4),
        "first token p95, seconds": round(seconds[len(seconds) * 95 // 100], 4),
    }


def _send(
    server: RunningProxy, model: str, text: str, n_answer: int, refusals: Sequence[int] = _ERRORS
) -> _Sent | None:
    """Send one request; return None if it was refused with one of *refusals*, exit at another."""
    length = {"max_tokens": max(1, n_answer), "ignore_eos": True, "temperature": 0}
    shown = {"stream": True, "stream_options": {"include_usage": True}}
    body = msgspec.json.encode({"model": model, "prompt": text, **length, **shown})
    began, first, usage = time.monotonic(), 0.0, dict[str, Any]()
    for told in server.lines("/v1/completions", body=body, refusals=refusals):
        first, usage = first or time.monotonic() - began, told.get("usage") or usage
    n_reused = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return (n_prompt, n_reused, first) if (n_prompt := usage.get("prompt_tokens")) else None


# What a trace tells, and prompts made up from its numbers.


def share_known(trace: Iterable[TracedRequest]) -> float:
    """Return the share of prompt tokens in blocks that an earlier request began with."""
    known, n_known, n_tokens = set[int](), 0, 0
    for request in trace:
        n_blocks = sum(1 for _ in takewhile(known.__contains__, request.hash_ids))
        n_known += min(n_blocks * TRACED_TOKENS, request.input_length - 1)
        n_tokens += request.input_length
        known.update(request.hash_ids)
    return n_known / max(1, n_tokens)


def trace_in_words(trace: Sequence[TracedRequest]) -> dict[str, str]:
    """Return what a trace tells, in lines; it has one request at least."""
    prompts = [request.input_length for request in trace]
    n_blocks = len(set().union(*(request.hash_ids for request in trace)))
    return {
        "requests": f"{len(trace):,} in {seconds_in_words(trace[-1].timestamp / 1000)}",
        "prompts": f"{min(prompts):,} to {max(prompts):,} tokens, median {median(prompts):,.0f}",
        "answers": f"up to {max(request.output_length for request in trace):,} tokens",
        "blocks": f"{n_blocks:,} different ones, of which it has numbers alone",
        "known": f"{share_known(trace):.1%} of the tokens, in blocks that an earlier prompt had",
    }


def texts_of(trace: Sequence[TracedRequest]) -> dict[int, int]:
    """Return for each partial last block the number of the block whose text it begins with.

    The next prompt of a conversation mostly goes on inside the last block of this prompt: there another
    block takes the place of the partial one. A partial block that no block replaces has a text of its own.
    """
    text_of: dict[int, int] = {}
    next_behind: dict[int, int] = {}
    for request in reversed(trace):
        ids = request.hash_ids
        if request.input_length % TRACED_TOKENS and len(ids) > 1:
            text_of[ids[-1]] = next_behind.get(ids[-2], ids[-1])
        next_behind.update((one, text_of.get(other, other)) for one, other in pairwise(ids))
    return text_of


def words_for(request: TracedRequest, text_of: dict[int, int], words_per_token: float) -> str:
    """Return a prompt of about the request's length; equal numbers give equal texts."""
    words: list[str] = []
    for index, number in enumerate(request.hash_ids):
        n_tokens = min(TRACED_TOKENS, request.input_length - index * TRACED_TOKENS)
        text, n_words = text_of.get(number, number), round(n_tokens * words_per_token)
        chosen = (xxh3_64_intdigest(b"%d %d" % (text, i)) for i in range(n_words))
        words += [kwlist[digest % len(kwlist)] for digest in chosen]
    return " ".join(words)


# `llama-prefix-cache bench`.

_ANSWER_TOKENS, _N_ROUNDS = 16, 3
_METRIC = re.compile(r"(?m)^\w+_cache_((?!\w*bucket)(?:save|restore|written|evalu|build).*) (\S+)$")
_VALUE = re.compile(r"--?[a-z][a-z-]*|-?[\d.,]+|on|off|auto|none|b?f\d+|i?q\d\w{0,4}")
_MACHINE = (
    "uname -srm; nproc; grep -m1 'model name' /proc/cpuinfo; grep MemTotal /proc/meminfo;"
    " sysctl -n machdep.cpu.brand_string hw.memsize;"
    " nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader"
    " || rocm-smi --showproductname --csv || llama-server --list-devices"
)


@click.command()
@command.file_option("--report", "file")
@click.option(
    "--tokens",
    multiple=True,
    type=click.IntRange(1),
    default=(2048, 8192, 32768),
    show_default=True,
)
@click.option("--url", help="Where clients reach the proxy. [its --listen]")
@click.option("--api-key", envvar="LLAMA_API_KEY", default="none", help="llama-server's API key.")
@command.yes_option
@command.with_proxy
def bench(proxy: RunningProxy, file: Path, tokens: tuple[int, ...], **clients: Any) -> None:
    """Measure this machine, and write a report for the project.

    \b
    llama-prefix-cache bench --report report.json
    llama-prefix-cache bench --report report.json --tokens 4096 --tokens 65536

    bench plays conversations of --tokens tokens, one more than there are slots. Each goes on once, and
    comes back twice: so states are evaluated, found in their slots, saved and restored. Requests that do
    not fit the context fail. Nobody else should use the proxy meanwhile. The saved states are deleted when
    their room is needed. The report has the machine, its GPUs, llama-server's build, its flags with
    numbers, the model's name, and the figures of each request; no text, path or key. Look at the report
    before you send it.
    """
    overview = proxy.overview()
    server = proxy.for_clients(overview, **clients)
    model, servers = server.model_that_runs(overview)
    trace = list(_rounds(tokens, 1 + sum(len(each["slots"]) for each in servers)))
    figures = send_all(trace, server, model["id"])
    last = proxy.ask("GET", "/requests", dict[str, Any], query={"limit": str(len(trace))})
    report = {
        "machine": _said(_MACHINE),
        "flags": [_flags(line) for line in _said("ps -wweo args | grep '[l]lama-server '")],
        "servers": [{k: each[k] for k in ("build", "rule", "n_ctx")} for each in servers],
        "model": {"name": Path(model["id"]).name, **(model.get("meta") or {})},
        "figures": figures,
        "requests": [_figures(each) for each in last["requests"][::-1]],
        "metrics": dict(_METRIC.findall(proxy.text("/metrics"))),
    }
    file.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    tell({**figures, "written": str(file)})


def _rounds(sizes: Iterable[int], n_conversations: int) -> Iterator[TracedRequest]:
    """Yield requests of conversations that take turns, each with two requests in a row."""
    numbers = count()
    for n_blocks in (-(-size // TRACED_TOKENS) for size in sizes):
        each = [list(islice(numbers, n_blocks + 2 * _N_ROUNDS)) for _ in range(n_conversations)]
        for n, ids, more in product(range(_N_ROUNDS), each, (0, 1)):
            known = ids[: n_blocks + 2 * n + more]
            yield TracedRequest(0, len(known) * TRACED_TOKENS, _ANSWER_TOKENS, known)


def _said(line: str) -> list[str]:
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


def _flags(line: str) -> list[str]:
    """Return flags, and those of their values that are numbers or types, but no key."""
    words = pairwise(line.split())
    return [w for flag, w in words if _VALUE.fullmatch(w) and not re.search("key|token", flag)]


def _figures(record: dict[str, Any]) -> dict[str, Any]:
    told = {name: value for name, value in record.items() if isinstance(value, int | float)}
    return told | {"at": None, "chosen": record["chosen"]}
