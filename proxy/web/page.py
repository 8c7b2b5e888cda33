"""The live page of the admin listener: its files, and the overviews of the proxy that it shows.

An open page asks for an overview twice a second. While no page is open, none is made.
"""

import asyncio
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiohttp import web

from proxy.core.slots import TAINTED
from proxy.errors import UpstreamFault
from proxy.llama.client import SlotStatus
from proxy.servers.pool import Pool
from proxy.serving.request import Request
from proxy.serving.services import Services
from proxy.web.admin import json_response, status_of

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""The page loads and runs only its own files: it can show the content of requests only as text."""
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_ASSETS = Path(__file__).with_name("assets")
MAX_REQUESTS = 50
"""The most requests in one overview; earlier requests are at /requests."""
_MAX_DIGITS = 18
PROGRESS_SECONDS = 1.0


class LivePage:
    """Serves the page at `/`, its files under `/page/`, and overviews of the running proxy."""

    def __init__(self, shared: Services, pool: Pool) -> None:
        self._shared = shared
        self._pool = pool
        self._run = secrets.token_hex(4)
        self._progress: dict[tuple[str, int], SlotStatus] = {}
        self._asking: asyncio.Task[None] | None = None
        self._asked_at = 0.0

    def _ask_for_progress(self) -> None:
        """Begin to ask every busy llama-server for its progress, once a second at most.

        The overview does not wait for the answers: a llama-server answers only between two batches.
        """
        is_due = time.monotonic() - self._asked_at > PROGRESS_SECONDS
        if not self._shared.journal.in_flight:
            self._progress.clear()
        elif is_due and (self._asking is None or self._asking.done()):
            self._asked_at = time.monotonic()
            self._asking = self._shared.tasks.start(self._ask())

    async def _ask(self) -> None:
        for process in self._pool.processes:
            if any(slot.is_leased for slot in process.slots):
                with suppress(UpstreamFault):  # GET /slots is off, or llama-server is gone
                    for status in await process.upstream.slots():
                        self._progress[process.server_name, status.id] = status

    def _flight(self, request: Request) -> dict[str, Any]:
        """Return a request that has not ended; `phase` names its wait or its work.

        `n_done` tokens of its prompt are in the slot; null if their number is not known.
        """
        plan = request.account.plan if request.account else None
        n_reused = n_done = plan.start.n_reused if plan else None
        phase, n_generated = self._phase(request), 0
        status = self._progress.get((request.server, plan.slot_id)) if plan else None
        if status is not None and status.is_processing and phase in ("evaluates", "answers"):
            if status.n_prompt_tokens_processed is not None:
                n_cached = status.n_prompt_tokens_cache or 0
                n_done = max(n_done or 0, n_cached + status.n_prompt_tokens_processed)
            n_generated = status.n_generated
        return {
            **self._shared.report.described(request),
            "id": request.id,
            "at": request.at,
            "path": request.path,
            "server": request.server,
            "phase": phase,
            "slot": plan.slot_id if plan else None,
            "n_prompt": request.prompt.n_tokens if request.prompt else None,
            "n_reused": n_reused,
            "n_done": n_done,
            "n_generated": n_generated,
        }

    def _phase(self, request: Request) -> str:
        process = next((p for p in self._pool.processes if p.server_name == request.server), None)
        if request.answer is not None:
            return "ends"
        if request.answering.is_set():
            return "answers"
        if process is None:
            return "waits for llama-server"
        if request.account is None:
            if request.prompt is not None:
                return "waits for a slot"
            return "is forwarded" if request.why else "is read"
        is_loading = process.slots[request.account.plan.slot_id].content is TAINTED
        return "restores" if is_loading else "evaluates"

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/", self.file),
            web.get("/page/{name}", self.file),
            web.get("/overview", self.overview),
            web.get("/history", self.history),
        ]

    async def history(self, request: web.Request) -> web.Response:
        """Return how much was reused in the last two hours, in the last 30 days, and today."""
        self._shared.journal.today()  # a new day may have begun since the last request
        return json_response(self._shared.journal.past)

    async def file(self, request: web.Request) -> web.FileResponse:
        """Return the named file of the page, or the page itself."""
        path = _ASSETS / request.match_info.get("name", "index.html")
        if path not in _ASSETS.iterdir():
            raise web.HTTPNotFound
        return web.FileResponse(path, headers=_HEADERS)

    async def overview(self, request: web.Request) -> web.Response:
        """Return the present state and the requests since a position; the last ones if it is not known.

        The field `position` names this overview: an overview since that position has only later requests.
        """
        self._ask_for_progress()
        journal = self._shared.journal
        run, _, number = request.query.get("since", "").partition("-")
        is_known = run == self._run and number.isdecimal() and len(number) <= _MAX_DIGITS
        n_seen = int(number) if is_known else 0
        return json_response(
            **status_of(self._shared, self._pool),
            in_flight=[self._flight(each) for each in journal.in_flight.values()],
            today=journal.today(),
            keeps=journal.keep,
            position=f"{self._run}-{journal.n_recorded}",
            requests=journal.latest(min(MAX_REQUESTS, journal.n_recorded - n_seen)),
        )
