"""Who has put what into the shared store, and why two of them do not share: for `doctor --shared`."""

from collections import defaultdict

import msgspec

from proxy.core.model import is_same_canary
from proxy.errors import StateDamaged
from proxy.shared import objects
from proxy.shared.bucket import Bucket
from proxy.shared.objects import META, STATE, Listed, Meta
from proxy.shared.sealing import Sealing
from proxy.store.known_models import Owner


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What one writer has put there for one model; an empty `model` was sealed with another key."""

    host: str
    writer: str
    model: str
    namespace: str
    n_states: int
    size_bytes: int
    newest_at: float
    apart: tuple[str, ...] = ()
    """Other writers of a model of this name whose states this one cannot use, each with the reason."""


async def survey(bucket: Bucket, sealing: Sealing) -> list[Share]:
    """Return what is in the shared store, by writer and namespace; raises SharedStoreFault."""
    found = defaultdict[tuple[str, str], list[Listed]](list)
    async for batch in bucket.list(objects.VERSION):
        for each in batch:
            found[objects.writer_of(each.id), each.namespace].append(each)
    shares = list[tuple[Share, Owner | None]]()
    for (writer, namespace), listed in sorted(found.items()):
        if metas := [each for each in listed if each.kind == META]:
            newest = max(metas, key=lambda each: each.modified_at)
            meta = await _read(bucket, sealing, newest)
            share = Share(
                host=meta.host if meta else "",
                writer=writer,
                model=meta.owner.known.name if meta else "",
                namespace=namespace,
                n_states=len(metas),
                size_bytes=sum(each.size_bytes for each in listed if each.kind == STATE),
                newest_at=newest.modified_at,
            )
            shares.append((share, meta.owner if meta else None))
    return [_with_reasons(share, owner, shares) for share, owner in shares]


async def _read(bucket: Bucket, sealing: Sealing, each: Listed) -> Meta | None:
    try:
        return objects.decode_meta(sealing.open_whole(each.name, await bucket.read(each.name)))
    except (ValueError, StateDamaged):
        return None


def _with_reasons(
    share: Share, owner: Owner | None, shares: list[tuple[Share, Owner | None]]
) -> Share:
    reasons = (
        f"{other.host} ({other.writer}): {why}"
        for other, its in shares
        if owner and its and other.model == share.model and other.writer != share.writer
        if (why := why_apart(owner, its))
    )
    return msgspec.structs.replace(share, apart=tuple(reasons))


def why_apart(left: Owner, right: Owner) -> str:
    """Return why the states of two owners are not shared, empty if they are."""
    if left.static != right.static:
        return "another model file, adapter, slot file version or cache layout"
    if left.tenant != right.tenant:
        return "another API key or salt"
    a, b = left.known.canary, right.known.canary
    if is_same_canary(a, b):
        return ""
    differences = (abs(x - y) for (s, x) in a for (t, y) in b if s == t)
    most = max(differences, default=0.0)
    return f"its predictions differ by up to {most:.2f}: other hardware, build or weights"
