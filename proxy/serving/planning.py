"""The plan of one request whose prompt is known: looked up and made anew whenever a slot may be had.

Owns: what the request would restore, kept from eviction until its restore is done.
"""

import time
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from types import TracebackType

from proxy.core.conditions import DegradationKind
from proxy.core.model import Candidate, Checkpoint, Prompt, SlotId
from proxy.core.plan import Occupant, Plan, Restore, Situation, most_useful, plan_request, promising
from proxy.core.residency import Offer, make_offer
from proxy.errors import StoreFault
from proxy.serving.desk import Choice
from proxy.serving.process import Process


class Planning:
    """Plans one request; leaving the `with` block lets go of what it would restore."""

    def __init__(self, process: Process, prompt: Prompt) -> None:
        self._process = process
        self._prompt = prompt
        self._kept = ExitStack()

    def __enter__(self) -> "Planning":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of what was kept from eviction."""
        self._kept.close()

    def note_arrival(self) -> None:
        """Tell the store what is asked for; whoever comes to a queue is not planned at once."""
        try:
            self._process.store.note_asked(self._prompt.namespace, self._prompt.tokens)
        except StoreFault as fault:
            self._process.faults.record("lookup", fault)
        if self._process.desk.n_waiting:
            self._keep_most_useful(self._look_up()[0])

    def choose(self) -> Choice[Plan] | None:
        """Plan the request over the slots and checkpoints as they are now.

        What the plan restores is kept from eviction in the same step. While the request has to wait,
        that is what it would restore if it found no live slot.
        """
        if self._process.launches.is_save_coming:
            return None  # it would find an empty slot
        began = time.perf_counter()
        self._kept.close()
        now = self._situation()
        plan = plan_request(self._prompt, now)
        if plan is None:
            self._keep_most_useful(now.candidates)
        elif isinstance(plan.start, Restore):
            self._keep(plan.start.checkpoint)
        self._process.metrics.lookup_seconds.observe(time.perf_counter() - began)
        return Choice((plan.slot_id,), plan, plan.is_warm) if plan else None

    def again(self, slot_id: SlotId) -> Plan:
        """Plan the request anew in the slot that it has, when what it was to restore is gone."""
        now = self._situation()
        mine = replace(now.slots[slot_id], is_leased=False)
        plan = plan_request(self._prompt, replace(now, slots=(mine,), coming=()))
        assert plan is not None  # a slot is free, and nothing is waited for
        if isinstance(plan.start, Restore):
            self._keep(plan.start.checkpoint)
        return plan

    def offer(self) -> Offer:
        """Return what this llama-server could do for the request at once; nothing is kept for it."""
        launches = self._process.launches
        n_waiting = self._process.desk.n_waiting + launches.n_waiting
        may_start = not launches.is_save_coming
        return make_offer(self._prompt, self._situation(), n_waiting, may_start=may_start)

    def _situation(self) -> Situation:
        process, now = self._process, time.monotonic()
        slots = tuple(process.slots)
        candidates, n_shared = self._look_up()
        return Situation(
            process.rule,
            slots,
            candidates,
            process.rates,
            process.n_ctx,
            n_shared,
            tuple(
                Occupant(s.content, process.state_bytes(s.content), now - s.used_at) for s in slots
            ),
            self._process.arrivals.coming(),
            process.bytes_of(self._prompt.cuts.shared),
        )

    def _keep_most_useful(self, candidates: tuple[Candidate, ...]) -> None:
        wanted = most_useful(self._process.rule, candidates, self._prompt.n_tokens)
        if wanted is not None:
            self._keep(wanted.checkpoint)

    def _keep(self, checkpoint: Checkpoint) -> None:
        self._kept.enter_context(self._process.store.keep(checkpoint))
        self._process.store.verify_soon(checkpoint)

    def _look_up(self) -> tuple[tuple[Candidate, ...], int]:
        """Return the usable checkpoints, and how much the prompt shares with any, usable or not."""
        rule, prompt = self._process.rule, self._prompt
        if not rule.can_restore:
            return (), 0
        try:
            stored = self._process.store.find(prompt.namespace, prompt.tokens)
            longest = next(stored, None)
            found = (
                ()
                if longest is None
                else promising(rule, chain([longest], stored), prompt.n_tokens)
            )
        except Exception as fault:
            self._process.faults.record("lookup", fault)
            self._process.degrade(DegradationKind.LOOKUPS_FAIL, str(fault))
            return (), 0
        self._process.recover(DegradationKind.LOOKUPS_FAIL)
        return found, longest.n_common if longest else 0
