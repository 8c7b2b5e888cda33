"""`llama-prefix-cache trace`: requests without their texts, to be exported, looked at and replayed."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import msgspec

from proxy.cli.access import RunningProxy, agree_to_write, told_plainly, with_proxy
from proxy.cli.common import FILE, Exit, answer, fail, json_option, table_of, yes_option
from proxy.explain import trace as traces
from proxy.explain.trace import TracedRequest

_file = click.argument("file", type=FILE)


@click.group()
def trace() -> None:
    """Export requests without their texts, look at them, replay them."""


@trace.command("export")
@click.argument("file", type=FILE, callback=agree_to_write)
@yes_option
@with_proxy
def export(proxy: RunningProxy, file: Path) -> None:
    """Write the last requests into FILE, without any text.

    \b
    llama-prefix-cache trace export trace.jsonl

    Up to 2,000 requests since the proxy was started, in the format of Mooncake's traces: the second of each
    request, counted from the first one, the lengths of prompt and answer in tokens, and a number for each
    512 tokens of the prompt. Numbers count up as blocks appear: two prompts with the same number are the
    same up to there, and no number can be compared with a text or another trace. Whoever gets the file
    learns when and how much you work, how your conversations fork, and maybe, by the length of its system
    prompt, which client you use. Requests whose prompts were not read are left out; with explain_keep none
    that is all of them.
    """
    exported = proxy.ask("GET", "/trace", dict[str, list[TracedRequest]])["requests"]
    with told_plainly():
        file.write_bytes(msgspec.json.Encoder().encode_lines(exported))
    tell(traces.trace_in_words(_read(file)))


@trace.command("show")
@_file
@json_option
def show(file: Path) -> None:
    """Say what FILE tells, before it is given away; it is refused if anything else is in it."""
    tell(traces.trace_in_words(_read(file)))


def _read(file: Path) -> list[TracedRequest]:
    with told_plainly():
        try:
            read = msgspec.json.Decoder(TracedRequest).decode_lines(file.read_bytes())
        except ValueError:
            fail(f"{file} is not what `trace export` writes")
    return read or fail(f"there is no request in {file}")


def tell(facts: Mapping[str, object]) -> None:
    """Print facts, a line for each."""
    answer(facts, table_of((name, str(fact)) for name, fact in facts.items()))


@trace.command("replay")
@_file
@click.argument("url")
@click.option("--speed", default=1.0, help="Times as fast as it was; 0: one after the other. [1]")
@click.option("--model", default="", help="Where there are several models.")
@click.option("--api-key", envvar="LLAMA_API_KEY", default="none", help="llama-server's.")
@json_option
def replay(file: Path, url: str, speed: float, model: str, api_key: str) -> None:
    """Send the requests of FILE to URL, and say how much of them was reused.

    \b
    llama-prefix-cache trace replay trace.jsonl http://127.0.0.1:8081
    llama-prefix-cache trace replay trace.jsonl http://127.0.0.1:8080 --speed 10

    URL is a proxy, llama-server, or any server with /v1/completions that counts cached tokens in its usage.
    Prompts are made up: blocks with equal numbers are equal texts, of about 512 tokens of this model.
    Requests are sent at their times, whether or not earlier answers have come.
    """
    server = RunningProxy(url.removeprefix("http://").rstrip("/"), api_key)
    tell(send_all(_read(file), server, model, speed))


_N_AT_ONCE = 64
_Sent = tuple[int, int, float]
"""Prompt tokens, the reused ones among them, and the seconds until the first token of the answer."""


def send_all(
    trace: Sequence[TracedRequest], server: RunningProxy, model: str, speed: float = 0.0
) -> dict[str, float]:
    """Send the requests of a trace to any server; return the figures, beside the share that can be reused.

    Exits if the server does not answer, or counts no tokens.
    """
    # So many words that they show how many tokens a word has.
    probe = TracedRequest(0, 1024, 1, (-1, -2))
    if (tried := _send(server, model, traces.words_for(probe, {}, 1.0), 1)) is None:
        fail(f"{server.address} gives no answer that counts its tokens", Exit.UNAVAILABLE)
    text_of, words_per_token = traces.texts_of(trace), probe.input_length / tried[0]
    began = time.monotonic()

    def send(request: TracedRequest) -> _Sent | None:
        due = began + request.timestamp / 1000 / speed if speed else 0.0
        time.sleep(max(0.0, due - time.monotonic()))
        text = traces.words_for(request, text_of, words_per_token)
        return _send(server, model, text, request.output_length)

    with ThreadPoolExecutor(_N_AT_ONCE if speed else 1) as pool:
        sent = [each for each in pool.map(send, trace) if each]
    n_prompt, n_reused = sum(n for n, _, _ in sent), sum(n for _, n, _ in sent)
    seconds = sorted(seconds for *_, seconds in sent) or [0.0]
    return {
        "requests": len(trace),
        "failed": len(trace) - len(sent),
        "prompt tokens": n_prompt,
        "evaluated": n_prompt - n_reused,
        "share reused": round(n_reused / max(1, n_prompt), 4),
        "share in known blocks": round(traces.share_known(trace), 4),
        "first token p50, seconds": round(seconds[len(seconds) // 2], 4),
        "first token p95, seconds": round(seconds[len(seconds) * 95 // 100], 4),
    }


def _send(server: RunningProxy, model: str, text: str, n_answer: int) -> _Sent | None:
    """Send one request; return None if it was refused."""
    length = {"max_tokens": max(1, n_answer), "ignore_eos": True, "temperature": 0}
    shown = {"stream": True, "stream_options": {"include_usage": True}}
    body = msgspec.json.encode({"model": model, "prompt": text, **length, **shown})
    began, first, usage = time.monotonic(), 0.0, dict[str, Any]()
    for told in server.lines("/v1/completions", body=body, refusals=range(400, 600)):
        first, usage = first or time.monotonic() - began, told.get("usage") or usage
    n_reused = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return (usage["prompt_tokens"], n_reused, first) if usage else None
