"""Watches which llama-server process answers, attaches to it, and learns its rule.

A restart can take a tenth of a second, so looking at /health misses it: what is watched is the
process's own mark in /props, every second, after every connection error, and beside the tokenizing of
every request, where it costs no time.
"""

import asyncio
from collections.abc import Callable

from proxy.core.model import NO_RULE, Rule
from proxy.core.slots import Empty, Unknown
from proxy.driver.abandoned import outlast
from proxy.driver.attach import Attacher
from proxy.driver.attachment import Attachment
from proxy.driver.leases import Lease
from proxy.driver.memory import known_rule, remember_rule, remember_sizes
from proxy.driver.room import Room
from proxy.driver.self_test import SelfTest
from proxy.driver.services import Services
from proxy.driver.session import Session
from proxy.driver.slot_work import RewriteStateFile
from proxy.errors import CacheFault, UpstreamFault, UpstreamRefused, UpstreamSlow
from proxy.log import get_logger
from proxy.upstream.replies import Props

WATCH_SECONDS = 1.0
RETRY_SECONDS = 15.0
"""How often an attachment that cannot cache is tried again, while no slot is in use."""
ATTACH_WAIT_SECONDS = 30.0
"""How long a request waits for an attachment under way before it is forwarded without one."""


class Lifecycle:
    """Knows the current session, if there is one."""

    def __init__(
        self,
        services: Services,
        attacher: Attacher,
        new_session: Callable[[Attachment], Session],
        rewrite: RewriteStateFile,
    ) -> None:
        self._services = services
        self._upstream = services.upstream
        self._attacher = attacher
        self._new_session = new_session
        self._rewrite = rewrite
        self._log = get_logger("lifecycle")
        self._poked = asyncio.Event()
        self._look: asyncio.Task[None] | None = None
        self._is_retry_due = False
        self._may_adopt = True
        self.current: Session | None = None
        self.condition = "starting"

    async def session(self) -> Session | None:
        """Return the current session; if there is none, look once more, and wait a while for it."""
        if self.current is None:
            await self._look_for(ATTACH_WAIT_SECONDS)
        return self.current

    async def is_still(self, session: Session) -> bool:
        """Look at llama-server now; return whether *session* is still the current one."""
        await self._look_for(ATTACH_WAIT_SECONDS)
        return self.current is session

    async def attach_again(self) -> None:
        """Forget the session: a client changed adapters or slots, and nothing known holds any more."""
        self._may_adopt = False
        self._lose("attaching again")
        await self._look_for(ATTACH_WAIT_SECONDS)

    def poke(self) -> None:
        """Look at llama-server now: a connection to it has just failed."""
        self._poked.set()

    async def watch(self) -> None:
        """Follow llama-server until cancelled."""
        since_retry = 0.0
        while True:
            since_retry += WATCH_SECONDS
            self._is_retry_due = since_retry >= RETRY_SECONDS
            since_retry = 0.0 if self._is_retry_due else since_retry
            await self._look_for(None)
            self._poked.clear()
            try:
                async with asyncio.timeout(WATCH_SECONDS):
                    await self._poked.wait()
            except TimeoutError:
                pass

    async def _look_for(self, seconds: float | None) -> None:
        """Wait for a look at llama-server, at most *seconds*; everybody shares one that is under way."""
        if self._look is None or self._look.done():
            self._look = self._services.tasks.start(self._look_once())
        await asyncio.wait({self._look}, timeout=seconds)

    async def _look_once(self) -> None:
        try:
            props = await self._upstream.props()
            if props.total_slots < 1:
                self._lose("it has no slots: a router, or not a llama-server")
            else:
                await self._follow(props)
        except UpstreamSlow:
            pass  # busy is not gone
        except UpstreamFault as fault:
            self._lose(_condition_of(fault))
        except Exception as error:
            self._services.faults.record("lifecycle", error)

    async def _follow(self, props: Props) -> None:
        session = self.current
        process_id = await self._upstream.process_id(props)
        if session is None or session.attachment.process_id != process_id:
            await self._attach(props, process_id)
        elif (
            self._is_retry_due and not session.attachment.can_cache and _is_idle(session.attachment)
        ):
            await self._attach(props, process_id)

    def _lose(self, condition: str) -> None:
        if condition != self.condition:
            self._log.warning("llama-server is not available", reason=condition)
        self.condition = condition
        if self.current:
            self.current.attachment.desk.close()
            self.current = None

    async def _attach(self, props: Props, process_id: str) -> None:
        if self.current:
            self.current.attachment.desk.close()
            self.current = None
        attachment = await self._attacher.attach(props, process_id, may_adopt=self._may_adopt)
        self._may_adopt = self._may_adopt or attachment.can_cache
        session = self._new_session(attachment)
        self._outlast_strangers(session)
        rule = self._known_rule(attachment, props)
        if attachment.can_cache and rule is None:
            self._begin_self_test(session, props)
        attachment.rule = rule or NO_RULE
        self.current = session
        self._report(attachment, props)

    def _outlast_strangers(self, session: Session) -> None:
        """Keep the slots that were busy at first contact until whatever runs there has ended."""
        desk = session.attachment.desk
        for slot in desk.table:
            if slot.is_leased:
                ended = self._services.tasks.start(outlast(session, [slot.id]))
                desk.take_over(slot.id).hand_over(ended)

    def _known_rule(self, attachment: Attachment, props: Props) -> Rule | None:
        if not attachment.can_cache:
            return None
        return known_rule(self._services.store, attachment, props.build_info)

    def _report(self, attachment: Attachment, props: Props) -> None:
        condition = "attached" if attachment.can_cache else "; ".join(attachment.reasons)
        if condition != self.condition or attachment.can_cache:
            self._log.info(
                "attached to llama-server",
                build=props.build_info,
                slots=props.total_slots,
                caches=attachment.can_cache,
                rule=attachment.rule.kind.value,
                reasons=attachment.reasons,
            )
        self.condition = condition

    def _begin_self_test(self, session: Session, props: Props) -> None:
        """Reserve an empty slot before any request can, and probe it in the background."""
        desk = session.attachment.desk
        for slot in desk.table:
            if isinstance(slot.content, Empty) and (lease := desk.try_lease(slot.id)):
                task = self._services.tasks.start(self._self_test(session, props, lease))
                lease.hand_over(task)
                return
        session.attachment.reasons.append("no slot is empty, so the self-test has not run")

    async def _self_test(self, session: Session, props: Props, lease: Lease[None]) -> None:
        attachment, store = session.attachment, self._services.store
        (slot_id,) = lease.slot_ids
        attachment.desk.table.set_content(slot_id, Unknown(can_be_adopted=False))
        room = Room(self._services, attachment)
        test = SelfTest(self._upstream, store.files, room, slot_id, self._rewrite)
        try:
            meta = await self._upstream.model_meta()
            rule = await test.run(attachment.n_ctx, meta.n_vocab)
            await session.work.erase(slot_id)
            if rule.can_restore:  # that nothing can be restored may have been a disturbance
                await remember_rule(store, attachment, props.build_info, rule)
                await remember_sizes(store, attachment)
        except (CacheFault, OSError) as fault:
            self._services.faults.record("self-test", fault)
            attachment.reasons.append(f"the self-test failed: {fault}")
            return
        attachment.rule = rule
        self._log.info("self-test done", rule=rule.kind.value, end_holds_from=rule.end_holds_from)


def _is_idle(attachment: Attachment) -> bool:
    return attachment.desk.n_waiting == 0 and not any(s.is_leased for s in attachment.desk.table)


def _condition_of(fault: UpstreamFault) -> str:
    if isinstance(fault, UpstreamRefused):
        match fault.status:
            case 503:
                return "llama-server is loading its model"
            case 401:
                return "llama-server wants an API key: set upstream_api_key"
            case _:
                return f"not a llama-server: {fault}"
    return f"no answer: {fault}"
