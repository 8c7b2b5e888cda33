"""Requests whose prompt is not looked up: they still take leases, so that the slot table stays true."""

from collections.abc import Iterable

from proxy.core.bypass import choose_slot_for_bypass
from proxy.core.model import CheckpointKind, SlotId
from proxy.core.planning.displacement import MAX_LOST_TOKENS
from proxy.core.planning.erasure import must_be_erased
from proxy.core.prefix import Namespace
from proxy.core.slots import TAINTED, Known, Unknown
from proxy.driver.requests import Answer, GenerationRequest, Send
from proxy.driver.services import Services
from proxy.driver.session import Session
from proxy.driver.slots.abandoned import outlast
from proxy.driver.slots.lease import Choice, Lease
from proxy.driver.slots.slot_work import SlotWork
from proxy.errors import UpstreamFault
from proxy.upstream.bodies import GenerationBody, pin, taints_slot


async def clear_way(
    services: Services, session: Session, lease: Lease[None], namespace: Namespace
) -> bool:
    """Save what would be lost, and erase what may not be reused; return False if that failed."""
    cleared: set[SlotId] = set()
    is_clear = True
    while left := set(lease.held) - cleared:  # slots may join a placement meanwhile
        for slot_id in left:
            is_clear &= await _clear(services, session, lease, slot_id, namespace)
        cleared |= left
    return is_clear


async def _clear(
    services: Services, session: Session, lease: Lease[None], slot_id: SlotId, namespace: Namespace
) -> bool:
    table, work = session.attachment.desk.table, session.work
    content = table[slot_id].content
    if isinstance(content, Known) and content.n_unsaved > MAX_LOST_TOKENS:
        kind = CheckpointKind.CONVERSATION
        await services.finish(lease, session.saves.write_back(slot_id, kind))
    if must_be_erased(session.attachment.rule, table[slot_id].content, namespace):
        try:
            await services.finish(lease, work.erase(slot_id))
        except UpstreamFault:
            services.faults.count("erase")
            return await _overwrite(services, lease, work, slot_id, namespace)
    return True


async def _overwrite(
    services: Services, lease: Lease[None], work: SlotWork, slot_id: SlotId, namespace: Namespace
) -> bool:
    """Put one token into a slot that cannot be erased, for /v1/messages cannot be told to reuse nothing."""
    try:
        await services.finish(lease, work.overwrite(slot_id, namespace))
    except UpstreamFault:
        services.faults.count("erase")
        return False
    return True


def mark_unknown(
    session: Session,
    slot_ids: Iterable[SlotId],
    namespace: Namespace,
    body: GenerationBody | None = None,
) -> None:
    """Note that only llama-server knows what these slots hold; no lookup could find it in a file."""
    is_tainted = body is not None and taints_slot(body)
    table, rule = session.attachment.desk.table, session.attachment.rule
    for slot_id in slot_ids:
        # A slot that joined a placement was never cleared: what it held may be part of what it holds.
        is_unclear = must_be_erased(rule, table[slot_id].content, namespace)
        content = Unknown(namespace, can_be_adopted=False)
        table.set_content(slot_id, TAINTED if is_tainted or is_unclear else content)


def abandon(
    services: Services,
    session: Session,
    lease: Lease[None],
    namespace: Namespace,
    body: GenerationBody | None = None,
) -> None:
    """Hold the slots until nothing of the request can run in them any more."""
    if not lease.held:
        return  # a slot action took the lease along before anything was sent
    mark_unknown(session, lease.held, namespace, body)
    lease.hand_over(services.tasks.start(outlast(session, lambda: lease.reserved)))


async def serve_pinned(
    services: Services,
    session: Session,
    request: GenerationRequest,
    body: GenerationBody,
    send: Send,
) -> Answer:
    """Serve a request on one slot of our choice, whatever that holds."""
    desk = session.attachment.desk
    namespace = session.attachment.tenant_namespace(request.tenant)

    def choose() -> Choice[None] | None:
        slot = choose_slot_for_bypass(desk.table, namespace)
        return Choice((slot.id,), None) if slot else None

    with await desk.lease(choose) as lease:
        (slot_id,) = lease.slot_ids
        try:
            can_reuse = await clear_way(services, session, lease, namespace)
            answer = await send(
                pin(body, slot_id, reuses=can_reuse), lambda: desk.note_running(slot_id)
            )
        except BaseException:
            abandon(services, session, lease, namespace, body)
            raise
        mark_unknown(session, lease.slot_ids, namespace, body)
        return answer
