"""Builds what follows and serves one llama-server, out of what all of them share."""

from functools import partial

from proxy.llama.client import LlamaServer
from proxy.servers.attach import Attacher
from proxy.servers.attachment import Attachment
from proxy.servers.backend import Backend
from proxy.servers.background import Remembering, WriteBack
from proxy.servers.pool import IsHost
from proxy.servers.self_test import Learning
from proxy.servers.server import Absence, Lifecycle
from proxy.serving.cache import Cache
from proxy.serving.launches import Arrivals, Launches, Session
from proxy.serving.process import Services, Shared, SlotWork
from proxy.serving.prompts import PromptReader
from proxy.serving.rewriting import Overflow, Stabilizing
from proxy.serving.saver import RewriteStateFile, Room, Saver
from proxy.serving.saves import SlotSaves
from proxy.settings import Settings
from proxy.stabilize.model import parse_switches


class Builder:
    """Builds backends; what they know of conversations is the same for all."""

    def __init__(
        self,
        settings: Settings,
        shared: Shared,
        rewrite: RewriteStateFile,
        *,
        is_coming: bool,
        n_context_checkpoints: int,
    ) -> None:
        """*is_coming* says that llama-server is being started, so that the first requests wait for it.

        *n_context_checkpoints* is how many a slot is believed to keep.
        """
        self._settings = settings
        self._shared = shared
        self._rewrite = rewrite
        self._is_coming = is_coming
        self._n_context_checkpoints = n_context_checkpoints
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
            n_context_checkpoints=self._n_context_checkpoints,
            shares_between_api_keys=self._settings.share_between_api_keys,
        )
        is_coming = self._is_coming or bool(services.upstream.target.model)
        absence = Absence(self._settings.upstream_wait_seconds, is_expected=is_coming)
        begin = partial(new_session, services, saver)
        return Lifecycle(services, attacher, begin, Learning(services, saver), absence, is_host)


def new_session(services: Services, saver: Saver, attachment: Attachment) -> Session:
    """Return what serves requests for the process of *attachment*."""
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
