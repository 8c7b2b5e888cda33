"""`llama-prefix-cache bench`: figures of this machine, in a file that can be given away."""

import re
import subprocess
from collections.abc import Iterable, Iterator
from itertools import count, islice, pairwise, product
from pathlib import Path
from typing import Any

import click
import msgspec

from proxy.cli.access import RunningProxy, agree_to_write, told_plainly, with_proxy
from proxy.cli.common import FILE, yes_option
from proxy.cli.trace import send_all, tell
from proxy.explain.trace import TRACED_TOKENS, TracedRequest

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
@click.option("--report", "file", required=True, type=FILE, callback=agree_to_write, help="File.")
@click.option("--tokens", multiple=True, type=int, default=(2048, 8192, 32768), show_default=True)
@click.option("--url", help="Where clients reach the proxy. [its --listen]")
@yes_option
@with_proxy
def bench(proxy: RunningProxy, file: Path, tokens: tuple[int, ...], url: str | None) -> None:
    """Measure this machine, and write a report for the project.

    \b
    llama-prefix-cache bench --report report.json
    llama-prefix-cache bench --report report.json --tokens 4096 --tokens 65536

    Conversations of so many tokens, one more than there are slots, are begun, go on, and come back twice:
    they are evaluated, found in their slots, saved and restored. Requests that do not fit the context
    fail. Nobody else should use the proxy meanwhile; what was saved goes when its room is needed. In the
    report are the machine, its GPUs, llama-server's build, its flags with numbers, the model's name, and
    what each request took; no text, path or key. Look at it before you send it.
    """
    told = proxy.told()
    server, servers = proxy.clients_side(told, url), told["servers"]
    model = server.ask("GET", "/v1/models", dict[str, Any])["data"][0]
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
    with told_plainly():
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


def _said(command: str) -> list[str]:
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


def _flags(line: str) -> list[str]:
    """Return flags, and those of their values that are numbers or types, but no key."""
    words = pairwise(line.split())
    return [w for flag, w in words if _VALUE.fullmatch(w) and not re.search("key|token", flag)]


def _figures(record: dict[str, Any]) -> dict[str, Any]:
    told = {name: value for name, value in record.items() if isinstance(value, int | float)}
    return told | {"at": None, "chosen": record["chosen"]}
