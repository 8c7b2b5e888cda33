"""Learns the rule of an attached llama-server: remembers it, measures it, and measures it again.

A rule is measured once for a model and build. When restores that it promises are not reused, the
server has changed under it (other flags, say), and it is measured again.
"""

from proxy.core.bypass import choose_slot_to_empty
from proxy.core.degradation import DegradationKind
from proxy.core.model import CheckpointKind, RuleKind, SlotId
from proxy.core.probes import SelfTestResult
from proxy.core.slots import Empty, Unknown
from proxy.driver.contact.attachment import Attachment
from proxy.driver.contact.memory import known_self_test, remember_self_test, remember_sizes
from proxy.driver.contact.self_test import SelfTest
from proxy.driver.saving.room import Room
from proxy.driver.saving.saver import Saver
from proxy.driver.services import Services
from proxy.driver.session import Session
from proxy.driver.slots.lease import Lease
from proxy.driver.slots.turns import Turn
from proxy.log import get_logger


class Learning:
    """Gives attachments their rules."""

    def __init__(self, services: Services, saver: Saver) -> None:
        self._services = services
        self._upstream = services.upstream
        self._saver = saver
        self._log = get_logger("learning")

    def begin(self, session: Session) -> None:
        """Take the remembered rule; if there is none, reserve an empty slot and measure it there.

        Nothing is awaited, so that no request can come first.
        """
        attachment = session.attachment
        if not attachment.can_cache:
            return attachment.note_examined()
        known = known_self_test(self._services.store, attachment)
        if known is not None:
            self._publish(attachment, known)
        elif lease := self._lease_empty(session):
            self._start(session, lease, session.launches.try_turn() or Turn(None))
        else:
            attachment.note_examined()
            attachment.degrade(DegradationKind.NO_SLOT_FOR_SELF_TEST)

    def look_again(self, session: Session) -> None:
        """Measure the rule again if it has been contradicted; each time more has to speak against it."""
        attachment = session.attachment
        if attachment.n_contradictions < attachment.n_contradictions_allowed:
            return
        if (turn := session.launches.try_turn()) is None:
            return
        slot = choose_slot_to_empty(attachment.desk.table)
        lease = attachment.desk.try_lease(slot.id) if slot else None
        if lease is None:
            turn.end()
            return  # everything is busy: the next look may find a free slot
        self._log.warning(
            "restores are not reused as the rule says: the self-test runs again",
            rule=attachment.rule.kind.value,
            n_contradictions=attachment.n_contradictions,
        )
        attachment.n_contradictions = 0
        attachment.n_contradictions_allowed *= 2
        self._start(session, lease, turn)

    def _lease_empty(self, session: Session, without: SlotId | None = None) -> Lease[None] | None:
        desk = session.attachment.desk
        for slot in desk.table:
            if slot.id != without and isinstance(slot.content, Empty):
                if lease := desk.try_lease(slot.id):
                    return lease
        return None

    def _start(self, session: Session, lease: Lease[None], turn: Turn) -> None:
        if not session.attachment.is_caching:
            session.attachment.degrade(DegradationKind.SELF_TEST_PENDING)
        measuring = self._services.tasks.start(self._measure(session, lease.slot_ids[0]))
        measuring.add_done_callback(lambda _: turn.end())
        lease.hand_over(measuring)

    async def _measure(self, session: Session, slot_id: SlotId) -> None:
        attachment = session.attachment
        try:
            result = await self._run(session, slot_id)
            # That nothing can be restored may have been a disturbance: the next start measures again.
            remembered = result if result.rule.can_restore else None
            await remember_self_test(self._services.store, attachment, remembered)
            await remember_sizes(self._services.store, attachment)
        except Exception as error:
            self._services.metrics.self_tests.labels("failed").inc()
            if attachment.is_caching:  # by the rule known before, which stays
                self._services.faults.record("self-test", error)
            else:
                self._services.faults.count("self-test")
                attachment.fail_self_test(str(error) or type(error).__name__)
            return
        self._services.metrics.self_tests.labels(result.rule.kind).inc()
        self._publish(attachment, result)
        self._log.info(
            "self-test done",
            rule=result.rule.kind.value,
            end_holds_from=result.rule.end_holds_from,
            restores_beside=result.restores_beside,
            keeps_idle=result.keeps_idle,
        )

    async def _run(self, session: Session, slot_id: SlotId) -> SelfTestResult:
        attachment, work = session.attachment, session.work
        await session.launches.clear_others()
        # Of an empty slot nothing is due.
        await session.saves.write_back(slot_id, CheckpointKind.CONVERSATION)
        await work.erase(slot_id)
        attachment.desk.table.set_content(slot_id, Unknown(can_be_adopted=False))
        attachment.desk.reconsider()  # nobody need wait for what this slot held
        n_vocab = (await self._upstream.model_meta()).n_vocab
        room = Room(self._services, attachment, self._saver)
        test = SelfTest(self._upstream, room.probe, n_vocab, attachment.learn_evaluation)
        rule = await test.learn_rule(slot_id, attachment.n_ctx)
        result = SelfTestResult(rule)
        if rule.kind is not RuleKind.NOTHING:
            result = await self._try_beside(session, test, slot_id, result)
        await work.erase(slot_id)  # raises if the process that was measured is gone
        return result

    async def _try_beside(
        self, session: Session, test: SelfTest, slot_id: SlotId, result: SelfTestResult
    ) -> SelfTestResult:
        """Try two slots at once if another one is empty and nobody wants it."""
        if session.attachment.clears_idle_slots:
            return SelfTestResult(result.rule, None, False)  # each would empty the other
        other = self._lease_empty(session, without=slot_id)
        if other is None:  # what an earlier test found of two slots is still the best that is known
            known = session.attachment.self_test or result
            return SelfTestResult(result.rule, known.restores_beside, known.keeps_idle)
        with other:
            (other_id,) = other.slot_ids
            session.attachment.desk.table.set_content(other_id, Unknown(can_be_adopted=False))
            restores_beside, keeps_idle = await test.try_beside(slot_id, other_id)
            await session.work.erase(other_id)
        return SelfTestResult(result.rule, restores_beside, keeps_idle)

    def _publish(self, attachment: Attachment, result: SelfTestResult) -> None:
        attachment.set_rule(result.rule)
        attachment.self_test = result
        if attachment.clears_idle_slots is None and result.keeps_idle is not None:
            attachment.note_clearing(clears=not result.keeps_idle)
        if result.restores_beside:
            attachment.recover(DegradationKind.RESTORES_DISTURB)
        elif result.restores_beside is False and not attachment.clears_idle_slots:
            attachment.degrade(DegradationKind.RESTORES_DISTURB)
