"""Builds what follows and serves one llama-server, out of what all of them share."""

from functools import partial

from proxy.config import Settings
from proxy.driver.contact.absence import Absence
from proxy.driver.contact.attach import Attacher
from proxy.driver.contact.attachment import Attachment
from proxy.driver.contact.learning import Learning
from proxy.driver.contact.lifecycle import Lifecycle
from proxy.driver.contact.remembering import Remembering
from proxy.driver.fleet.backend import Backend
from proxy.driver.fleet.fleet import IsHost
from proxy.driver.saving.room import Room
from proxy.driver.saving.saver import RewriteStateFile, Saver
from proxy.driver.saving.slot_saves import SlotSaves
from proxy.driver.saving.write_back import WriteBack
from proxy.driver.services import Services, Shared
from proxy.driver.serving.cache import Cache
from proxy.driver.serving.overflow import Overflow
from proxy.driver.serving.prompts import PromptReader
from proxy.driver.serving.stabilizing import Stabilizing
from proxy.driver.session import Session
from proxy.driver.slots.arrivals import Arrivals
from proxy.driver.slots.launches import Launches
from proxy.driver.slots.slot_work import SlotWork
from proxy.stabilize.names import parse_switches
from proxy.upstream.llama_server import LlamaServer


class Builder:
    """Builds backends; what they know of conversations is the same for all."""

    def __init__(
        self, settings: Settings, shared: Shared, rewrite: RewriteStateFile, *, is_coming: bool
    ) -> None:
        """*is_coming* says that llama-server is being started, so that the first requests wait for it."""
        self._settings = settings
        self._shared = shared
        self._rewrite = rewrite
        self._is_coming = is_coming
        self.stabilizing = Stabilizing(shared, parse_switches(settings.stabilizers))
        self._overflow = Overflow(shared, is_on=settings.context_overflow == "stable")

    def build(self, upstream: LlamaServer, where: str, is_host: IsHost) -> Backend:
        """Return a backend; *where* tells its degradations from others', *is_host* is for its lifecycle."""
        services = self._shared.of(upstream, where)
        saver = Saver(services, self._rewrite)
        lifecycle = self._lifecycle(services, saver, is_host)
        idle_save_seconds = self._settings.idle_save_seconds
        return Backend(
            services,
            lifecycle,
            Cache(services, lifecycle, self.stabilizing, self._overflow),
            WriteBack(lifecycle, services.tasks, idle_save_seconds),
            Remembering(services, lifecycle),
        )

    def _lifecycle(self, services: Services, saver: Saver, is_host: IsHost) -> Lifecycle:
        attacher = Attacher(
            services,
            saver,
            max_waiting=self._settings.max_requests,
            n_context_checkpoints=self._settings.context_checkpoints,
        )
        is_coming = self._is_coming or bool(services.upstream.target.model)
        absence = Absence(self._settings.upstream_wait_seconds, is_expected=is_coming)
        begin = partial(_new_session, services, saver)
        return Lifecycle(services, attacher, begin, Learning(services, saver), absence, is_host)


def _new_session(services: Services, saver: Saver, attachment: Attachment) -> Session:
    work = SlotWork(services, attachment)
    saves = SlotSaves(services, attachment, Room(services, attachment, saver))
    return Session(
        services.upstream,
        attachment,
        PromptReader(services.upstream, shares_headers=len(attachment.desk.table) > 1),
        work,
        saves,
        Launches(services, attachment, work, saves),
        Arrivals(attachment.desk),
    )
