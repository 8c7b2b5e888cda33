"""Whether answers through the proxy are those that llama-server gives by itself.

Each request of the session is answered three times, one at a time, temperature 0: through the proxy;
by hand at the same cuts (see by_hand); and cold: the same body with `cache_prompt` false, pinned to a
slot that was just erased. Compared are the log-probabilities of the ten likeliest first tokens, and
greedy texts of 32 tokens.

llama-server's flash attention on CPUs computes a batch of less than 64 tokens in another way than a
longer one, with results that differ by up to 0.12 on the lab's full-attention model. A cold run ends in
a batch of whatever is left of 512. So where a request is further than the bar from its cold run, a
second one whose prompt is evaluated in two pieces is the reference, and both distances are shown.
"""

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass, replace

from tests.bench.answers import FIELDS, Answer, distance, diverges_at, read_answer
from tests.bench.by_hand import ByHand
from tests.bench.progress import tell
from tests.bench.request_log import RequestLog, Way
from tests.bench.rigs import new_server, open_rig
from tests.bench.section import Section
from tests.bench.workload import Request, session
from tests.lab.models import MEMORIES

BY_HAND_BAR = 0.0005
COLD_BARS = {"full": 0.005, "swa": 0.012, "recurrent": 0.005, "hybrid": 0.005}


@dataclass(frozen=True, slots=True)
class Compared:
    """One request's answers from the proxy, by hand and cold."""

    request: Request
    proxied: Answer
    by_hand: Answer
    cold: Answer
    reuses_alike: bool
    cold_in_two_pieces: Answer | None = None

    @property
    def to_cold(self) -> float:
        """Return the distance to the cold run, or to its control where there is one."""
        control = self.cold_in_two_pieces
        to_cold = distance(self.proxied, self.cold)
        return min(to_cold, distance(self.proxied, control)) if control else to_cold


async def measure_correctness(leftovers: ExitStack, log: RequestLog) -> Section:
    """Return the table."""
    section = Section(
        "First-token log-probabilities through the proxy (temperature 0, one request at a time)",
        f"by hand <= {BY_HAND_BAR}, cold <= 0.005 (SWA 0.012)",
        ("memory", "requests", "by hand", "cold", "texts as by hand", "texts as cold"),
    )
    for kind in MEMORIES:
        _add(section, kind, await _compare(kind, leftovers, log))
    return section


async def _compare(kind: str, leftovers: ExitStack, log: RequestLog) -> list[Compared]:
    tell(f"correctness: {kind} through the proxy")
    requests = session()
    proxied = await _through_proxy(kind, requests, leftovers, log)
    tell(f"correctness: {kind} by hand")
    server = new_server(kind, leftovers)
    await asyncio.to_thread(server.start)
    hand = ByHand(server, restores_at_stops=kind != "swa")
    by_hand = [
        await hand.answer(request, way) for request, (_, way) in zip(requests, proxied, strict=True)
    ]
    tell(f"correctness: {kind} cold")
    compared = []
    for request, (ours, way), (theirs, n_reused) in zip(requests, proxied, by_hand, strict=True):
        cold = await hand.cold_answer(request)
        one = Compared(request, ours, theirs, cold, way.n_reused == n_reused)
        compared.append(await _with_control(hand, one, COLD_BARS[kind]))
    await asyncio.to_thread(server.stop)
    return compared


async def _with_control(hand: ByHand, compared: Compared, bar: float) -> Compared:
    if compared.to_cold <= bar:
        return compared
    control = await hand.cold_answer_in_two_pieces(compared.request)
    return replace(compared, cold_in_two_pieces=control)


async def _through_proxy(
    kind: str, requests: list[Request], leftovers: ExitStack, log: RequestLog
) -> list[tuple[Answer, Way]]:
    answers = []
    async with open_rig(kind, leftovers) as rig:
        for request in requests:
            if request.restarts:
                await rig.restart()
            reply = await rig.post("/v1/chat/completions", request.body(**FIELDS))
            await rig.settled()
            answers.append((read_answer(reply), log.take()))
    return answers


def _add(section: Section, kind: str, group: list[Compared]) -> None:
    to_hand = max(distance(one.proxied, one.by_hand) for one in group)
    to_cold = max(one.to_cold for one in group)
    has_same_cuts = all(one.reuses_alike for one in group)
    section.add(
        kind,
        len(group),
        f"{to_hand:.4f}" + ("" if has_same_cuts else " (other reuse)"),
        f"{to_cold:.4f}" + _describe_controls(group),
        _describe_texts([diverges_at(one.proxied, one.by_hand) for one in group]),
        _describe_texts([diverges_at(one.proxied, one.cold) for one in group]),
        is_met=to_hand <= BY_HAND_BAR and to_cold <= COLD_BARS[kind] and has_same_cuts,
    )


def _describe_controls(group: list[Compared]) -> str:
    controlled = [distance(one.proxied, one.cold) for one in group if one.cold_in_two_pieces]
    return f" ({max(controlled):.4f} to a short last batch)" if controlled else ""


def _describe_texts(divergences: list[int | None]) -> str:
    differing = [f"token {index + 1}" for index in divergences if index is not None]
    same = f"{len(divergences) - len(differing)} of {len(divergences)}"
    return f"{same} ({', '.join(differing)})" if differing else same
