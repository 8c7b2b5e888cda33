"""How far a restored state is from a fresh evaluation, in KL divergence, beside llama-server's own floor.

Of each random prompt, a random first part (the cut) goes through the proxy and is displaced by the next
one. Then both processes are restarted, and the whole prompt goes through the proxy, which restores the
cut from disk. A second llama-server evaluates the prompt *fresh*, in an erased slot, and *live* at the same
cut, in two pieces without a save. The *floor* is what another batch size alone changes: fresh with
`-ub 128`, and with `-ub 32`, since flash attention on CPUs computes batches under 64 in another way.

Compared with the fresh answer are the greedy tokens (32), and the KL divergence of each vector of
log-probabilities up to the first token that differs: behind it the texts are different ones. llama-server
gives the 100 likeliest tokens; those that both answers name count one by one, all others as one outcome,
so that the figure is a lower bound. The first prompt of each memory type is asked for the whole vocabulary,
which shows how much that leaves out. Exit status 1 if a restored state is further away than the floor.

python -m tests.bench.divergence [--seeds N] [--cuts N] [--kind KIND ...] [--folder FOLDER [--known]]
                              [--document]
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from math import exp, log
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from tests.bench.document import add_page_arguments, prove
from tests.bench.interrupts import run_to_the_end
from tests.bench.progress import tell
from tests.bench.section import Section
from tests.lab.conversation import prose
from tests.lab.models import MEMORIES, model_path
from tests.lab.rig import Rig
from tests.lab.server import DEFAULT_MODEL_FOLDER, LlamaServer

N_ANSWER = 32
N_TOP = 100
LEAST_TOKENS, MOST_TOKENS = 300, 1500
MOST_OF_KIND = {"swa": 4000}
"""So that a restored window of 512 tokens is followed by several batches."""
LEAST_CUT = 128
FLOORS = ("-ub 128", "-ub 32")
WAYS = ("restored", "live", *FLOORS)

Vector = dict[int, float]
"""Log-probabilities by token."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Greedy tokens, and the log-probabilities that each was chosen from."""

    tokens: tuple[int, ...]
    vectors: tuple[Vector, ...]


@dataclass
class Distances:
    """What one way differs in from fresh, over all cuts of one seed."""

    kl: list[float] = field(default_factory=list)
    n_equal: int = 0
    n_cuts: int = 0
    n_not_restored: int = 0
    left_out: list[float] = field(default_factory=list)
    """KL by the whole vocabulary less that by the likeliest, where both are known."""


def kl_divergence(left: Vector, right: Vector) -> float:
    """Return KL(left || right) in nats; tokens that one of them lacks are one outcome."""
    common = left.keys() & right.keys()
    pairs = [(exp(left[t]), left[t] - right[t]) for t in common]
    p_rest = 1.0 - sum(exp(left[t]) for t in common)
    q_rest = 1.0 - sum(exp(right[t]) for t in common)
    # Below that, the rest is what rounding leaves of one.
    is_rounding = min(p_rest, q_rest) < 1e-6
    rest = 0.0 if is_rounding else p_rest * log(p_rest / q_rest)
    return max(0.0, sum(p * difference for p, difference in pairs) + rest)


def kls(fresh: Answer, other: Answer) -> Iterator[float]:
    """Yield the divergence of each vector up to the first token that differs."""
    for i, (left, right) in enumerate(zip(fresh.vectors, other.vectors, strict=True)):
        yield kl_divergence(left, right)
        if fresh.tokens[i] != other.tokens[i]:
            return


def likeliest(answer: Answer) -> Answer:
    """Return the answer as llama-server gives it for N_TOP."""
    cut = [dict(sorted(v.items(), key=lambda item: -item[1])[:N_TOP]) for v in answer.vectors]
    return Answer(answer.tokens, tuple(cut))


def read_answer(reply: dict[str, Any]) -> Answer:
    steps = reply["completion_probabilities"]
    vectors = ({t["id"]: t["logprob"] for t in step["top_logprobs"]} for step in steps)
    return Answer(tuple(step["id"] for step in steps), tuple(vectors))


def body(prompt: Sequence[int], n_probs: int = 0, **fields: Any) -> dict[str, Any]:
    """Return a greedy request; without *n_probs* one that only evaluates."""
    length = {"n_predict": N_ANSWER, "n_probs": n_probs} if n_probs else {"n_predict": 1}
    return {"prompt": [*prompt], "temperature": 0, "ignore_eos": True, **length, **fields}


@dataclass(frozen=True, slots=True)
class Cut:
    """A prompt and where it is cut; `n_probs` tokens of each vector are asked for."""

    prompt: tuple[int, ...]
    n_first: int
    n_probs: int


def random_cuts(server: LlamaServer, kind: str, seed: int, n_cuts: int) -> list[Cut]:
    """Return prompts of words, each with a random length and a random cut."""
    rng, n_most = random.Random(seed), MOST_OF_KIND.get(kind, MOST_TOKENS)
    n_vocab = server.request("GET", "/v1/models")[1]["data"][0]["meta"]["n_vocab"]
    cuts = []
    for i in range(n_cuts):
        text = prose(rng.randrange(1 << 30), n_most)
        reply = server.request("POST", "/tokenize", {"content": f"{i} {text}"})[1]
        prompt = reply["tokens"][: rng.randint(LEAST_TOKENS, n_most)]
        n_first = rng.randint(LEAST_CUT, len(prompt) - 1)
        cuts.append(Cut(tuple(prompt), n_first, n_vocab if (seed, i) == (1, 0) else N_TOP))
    return cuts


def ask(server: LlamaServer, cut: Cut, *, is_live: bool = False) -> Answer:
    """Return the answer of a slot that was just erased, to a prompt in one piece or, live, in two."""
    pinned: dict[str, Any] = {"id_slot": 0, "cache_prompt": is_live}
    post = partial(server.request, "POST")
    post("/slots/0?action=erase", {})
    if is_live:
        post("/completion", body(cut.prompt[: cut.n_first], **pinned))
    status, reply = post("/completion", body(cut.prompt, cut.n_probs, **pinned))
    assert status == 200, reply
    return read_answer(reply)


async def restored(rig: Rig, cuts: list[Cut]) -> list[tuple[Answer, int]]:
    """Return the proxy's answers after a restart, and how many tokens were restored for each."""
    for cut in cuts:
        await rig.post("/completion", body(cut.prompt[: cut.n_first]))
        await rig.settled()
    await rig.restart()
    answers, n_before = [], 0.0
    for cut in cuts:
        reply = await rig.post("/completion", body(cut.prompt, cut.n_probs))
        n_restored = rig.sample("restored_tokens_total")
        answers.append((read_answer(reply), int(n_restored - n_before)))
        n_before = n_restored
        await rig.settled()
    return answers


def new_server(kind: str, folder: Path, *flags: str) -> LlamaServer:
    folder.mkdir(mode=0o700)
    model = model_path(kind, "tiny", DEFAULT_MODEL_FOLDER)
    log_path = folder.with_suffix(".log")
    return LlamaServer(model, folder, 1, 4096, extra_args=flags, log_path=log_path)


async def measure_seed(
    kind: str, seed: int, n_cuts: int, leftovers: ExitStack, folder: Path
) -> dict[str, Distances]:
    """Return what each way differs in from fresh."""
    plain, behind = new_server(kind, folder / "plain"), new_server(kind, folder / "slots")
    others = {way: new_server(kind, folder / way, *way.split()) for way in FLOORS}
    for server in (plain, behind, *others.values()):
        leftovers.callback(server.kill)
    await asyncio.to_thread(plain.start)
    cuts = await asyncio.to_thread(random_cuts, plain, kind, seed, n_cuts)

    def alone(server: LlamaServer, *, is_live: bool = False) -> list[Answer]:
        if not server.is_running:
            server.start()
        return [ask(server, cut, is_live=is_live) for cut in cuts]

    async def proxied() -> list[tuple[Answer, int]]:
        async with Rig(behind, folder / "slots") as rig:
            return await restored(rig, cuts)

    # Each llama-server has one thread, so that all ways together keep two cores busy.
    ways = (asyncio.to_thread(alone, server) for server in (plain, *others.values()))
    through, (fresh, *by_floor) = await asyncio.gather(proxied(), asyncio.gather(*ways))
    answers = dict(zip(others, by_floor, strict=True))
    answers["live"] = await asyncio.to_thread(alone, plain, is_live=True)
    for server in (plain, *others.values()):
        await asyncio.to_thread(server.stop)
    answers["restored"] = [answer for answer, _ in through]
    found = {way: Distances(n_cuts=n_cuts) for way in WAYS}
    for i, cut in enumerate(cuts):
        # A sliding-window state is continued a few tokens before its end.
        found["restored"].n_not_restored += through[i][1] < cut.n_first - 8
        for way in WAYS:
            _add(found[way], fresh[i], answers[way][i])
    return found


def _add(distances: Distances, fresh: Answer, other: Answer) -> None:
    by_likeliest = list(kls(likeliest(fresh), likeliest(other)))
    distances.kl += by_likeliest
    distances.n_equal += fresh.tokens == other.tokens
    if len(fresh.vectors[0]) > N_TOP:
        whole = kls(fresh, other)
        distances.left_out += [w - k for w, k in zip(whole, by_likeliest, strict=True)]


def p99(values: list[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[98]


FIGURES: tuple[Callable[[list[float]], float], ...] = (median, p99, max)


def add_rows(section: Section, kind: str, by_seed: list[dict[str, Distances]]) -> None:
    """Add one row for each way: figures over all seeds, and the spread of p99 over the seeds."""
    pooled = {way: [kl for seed in by_seed for kl in seed[way].kl] for way in WAYS}
    for way, values in pooled.items():
        per_seed = [p99(seed[way].kl) for seed in by_seed]
        n_equal = sum(seed[way].n_equal for seed in by_seed)
        n_cuts = sum(seed[way].n_cuts for seed in by_seed)
        at_most = (max(figure(pooled[floor]) for floor in FLOORS) for figure in FIGURES)
        is_met = all(figure(values) <= most for figure, most in zip(FIGURES, at_most, strict=True))
        section.add(
            kind,
            way,
            *(f"{figure(values):.2g}" for figure in FIGURES),
            f"{min(per_seed):.2g} to {max(per_seed):.2g}",
            f"{n_equal} of {n_cuts}",
            len(values),
            is_met=is_met if way == "restored" else None,
        )


def described(by_kind: dict[str, list[dict[str, Distances]]]) -> Section:
    """Return the table; what it leaves out is said on stderr."""
    n_cuts = sum(seed["restored"].n_cuts for seeds in by_kind.values() for seed in seeds)
    section = Section(
        f"Restored states: {n_cuts:,} cuts",
        "KL of restored not above that of another batch size: median, 99 %, largest",
        (
            *("memory", "against fresh", "KL: median", "99 %", "largest", "99 % by seed"),
            *("equal texts", "vectors"),
        ),
        n_keys=2,
    )
    for kind, by_seed in by_kind.items():
        add_rows(section, kind, by_seed)
        left_out = max(x for seed in by_seed for d in seed.values() for x in d.left_out)
        n_not = sum(seed["restored"].n_not_restored for seed in by_seed)
        tell(f"{kind}: the whole vocabulary adds at most {left_out:.2g}; {n_not} not restored")
    return section


async def run(given: argparse.Namespace, leftovers: ExitStack) -> int:
    """Measure and print; return the exit status."""
    by_kind: dict[str, list[dict[str, Distances]]] = {}
    for kind in given.kind:
        for seed in range(1, given.seeds + 1):
            kept = given.folder and given.folder / f"{kind}-{seed}-{given.cuts}.json"
            if kept and kept.exists():
                read = json.loads(kept.read_text())
                found = {way: Distances(**distances) for way, distances in read.items()}
            elif given.known:
                continue
            else:
                tell(f"{kind}, seed {seed}")
                with tempfile.TemporaryDirectory(prefix="prefix-cache-") as name:
                    found = await measure_seed(kind, seed, given.cuts, leftovers, Path(name))
            if kept:
                given.folder.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps({way: asdict(d) for way, d in found.items()}))
            by_kind.setdefault(kind, []).append(found)
    section = described(by_kind)
    print(section.markdown())
    prove(given, "divergence", [section])
    return 1 if section.n_missed else 0


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description="Compare restored states with fresh ones.")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--cuts", type=int, default=50, help="of each seed and memory type")
    parser.add_argument("--kind", nargs="+", choices=MEMORIES, default=list(MEMORIES))
    parser.add_argument("--folder", type=Path, help="keeps each seed's figures: not measured again")
    parser.add_argument("--known", action="store_true", help="only what the folder has")
    add_page_arguments(parser)
    given = parser.parse_args()
    return run_to_the_end(partial(run, given))


if __name__ == "__main__":
    sys.exit(main())
