"""One examination of one llama-server, from first contact to the last probe: it judges nothing.

Slots are only probed where nobody else decides over them: one that holds work is left alone.
"""

from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from proxy.doctor.behaviour import examine_behaviour
from proxy.doctor.bench import Bench, set_up
from proxy.doctor.directory import ProbeFiles
from proxy.doctor.facts import (
    BehaviourFacts,
    Contact,
    DirectoryFacts,
    Facts,
    ServerFacts,
    StoreFacts,
)
from proxy.doctor.hosts import Note
from proxy.doctor.memory import Model, examine_cost, examine_memory, examine_store, identify_model
from proxy.driver.saving.saver import RewriteStateFile, keep_as_saved
from proxy.errors import CacheFault, StoreFault, UpstreamFault, UpstreamRefused
from proxy.store.inspection import IndexContent, read_index
from proxy.upstream.llama_server import LlamaServer
from proxy.upstream.replies import Props

T = TypeVar("T")


class Examination:
    """Examines one llama-server, once."""

    def __init__(
        self,
        upstream: LlamaServer,
        directory: DirectoryFacts,
        files: ProbeFiles,
        *,
        host: str = "",
        name: str = "",
        has_key: bool = False,
        rewrite: RewriteStateFile = keep_as_saved,
        note: Note = lambda text: None,
    ) -> None:
        """Prepare; *host* is the kind of host that has it, *name* what it is called among others."""
        self._upstream = upstream
        self._directory = directory
        self._files = files
        self._known = ServerFacts(
            url=upstream.target.base_url, contact=Contact.ANSWERS, name=name, host=host
        )
        self._has_key = has_key
        self._rewrite = rewrite
        self._note: Note = (lambda text: note(f"{name}: {text}")) if name else note
        self._failures: list[str] = []

    async def run(self, *, may_probe: bool) -> Facts:
        """Return all facts, without probes in slots if they are not to be touched."""
        server, props = await self._contact()
        facts = Facts(server=server, directory=self._directory)
        if props is None or not may_probe:
            return facts
        try:
            if server.has_slot_save_path and not self._directory.problem:
                facts = await self._examine_slots(facts, props)
        except UpstreamFault as fault:
            self._failures.append(f"the slots could not be examined: {fault}")
        return replace(facts, failures=tuple(self._failures))

    async def _contact(self) -> tuple[ServerFacts, Props | None]:
        known = self._known
        try:
            props = await self._upstream.props()
            if props.total_slots < 1:
                return replace(known, contact=Contact.NO_SLOTS), None
            process_id = await self._upstream.process_id(props)
        except UpstreamFault as fault:
            contact = _contact_of(fault, has_key=self._has_key)
            return replace(known, contact=contact, detail=str(fault)), None
        server = replace(
            known,
            build=props.build_info,
            model=props.model_path,
            n_slots=props.total_slots,
            n_ctx=props.default_generation_settings.n_ctx,
            is_asleep=props.is_sleeping,
            is_restart_visible=bool(process_id),
        )
        try:
            can_save = await self._upstream.has_slot_save_path()
            return replace(server, has_slot_save_path=can_save), props
        except UpstreamFault as fault:
            return replace(server, detail=str(fault)), props

    async def _examine_slots(self, facts: Facts, props: Props) -> Facts:
        """Add what only slots can tell; raises UpstreamFault if llama-server goes away."""
        self._note("looking for empty slots")
        async with set_up(self._upstream, self._files, self._rewrite, props.total_slots) as bench:
            saved = bench.first_save
            facts = replace(facts, probe_save=saved)
            if saved is not None and (not saved.is_whole or saved.left_behind):
                return facts
            facts = replace(facts, slots=bench.facts)
            index = self._read_index()
            if bench.empty:
                facts = await self._probe(facts, bench, props, index)
        if not isinstance(index, IndexContent):
            return replace(facts, store=StoreFacts(problem=str(index)))
        used_bytes = sum(c.size_bytes for c in index.checkpoints)
        return replace(facts, directory=replace(facts.directory, used_bytes=used_bytes))

    def _read_index(self) -> IndexContent | StoreFault:
        try:
            return read_index(self._files.directory)
        except StoreFault as fault:
            return fault

    async def _probe(
        self, facts: Facts, bench: Bench, props: Props, index: IndexContent | StoreFault
    ) -> Facts:
        self._note("asking the model for its canary")
        model = await self._attempt("the model", bench, identify_model(bench, props))
        if model is None:
            return facts
        content = index if isinstance(index, IndexContent) else IndexContent()
        facts = replace(facts, store=examine_store(content, model), states=model.facts)
        return await self._probe_model(facts, bench, props, model, content)

    async def _probe_model(
        self, facts: Facts, bench: Bench, props: Props, model: Model, index: IndexContent
    ) -> Facts:
        n_ctx = props.default_generation_settings.n_ctx
        self._note("trying out idle slots, similarity and the RAM cache")
        behaviour = await self._attempt(
            "slot behaviour", bench, examine_behaviour(bench, model.state.version)
        )
        self._note("saving and restoring states of up to 4,400 tokens")
        memory = await self._attempt(
            "the memory rule", bench, examine_memory(bench, model, index, props.build_info, n_ctx)
        )
        self._note("measuring the size of states")
        cost = await self._attempt("the cost of a state", bench, examine_cost(bench, n_ctx))
        return replace(facts, behaviour=behaviour or BehaviourFacts(), memory=memory, cost=cost)

    async def _attempt(self, what: str, bench: Bench, work: Awaitable[T]) -> T | None:
        """Return the result of a probe, or note why there is none and clean up behind it."""
        try:
            return await work
        except (CacheFault, OSError) as fault:
            self._failures.append(f"{what} could not be examined: {fault}")
            with suppress(UpstreamFault):
                await bench.erase()
            return None


def _contact_of(fault: UpstreamFault, *, has_key: bool) -> Contact:
    if not isinstance(fault, UpstreamRefused):
        return Contact.UNREACHABLE
    match fault.status:
        case 503:
            return Contact.LOADING
        case 401:
            return Contact.KEY_WRONG if has_key else Contact.KEY_MISSING
        case _:
            return Contact.NOT_LLAMA_SERVER
