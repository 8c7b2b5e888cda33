"""The admin listener's view of recent requests: what each reused, and why not more.

Browsers' foreign pages are refused, as for checkpoints: explanations hold a few words of prompts.
"""

from aiohttp import web

from proxy.driver.reporting.journal import Journal
from proxy.front.json_answers import json_response, refuse_foreign_pages

DEFAULT_LIMIT = 50


class Requests:
    """Lists and explains requests."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/requests", self.list), web.get("/requests/{id}", self.explain)]

    async def list(self, request: web.Request) -> web.Response:
        """Return the last requests that have ended, the newest first."""
        refuse_foreign_pages(request)
        try:
            limit = int(request.query.get("limit", DEFAULT_LIMIT))
        except ValueError:
            return json_response(400, {"error": "limit is not a number"})
        return json_response(200, {"requests": self._journal.latest(limit)})

    async def explain(self, request: web.Request) -> web.Response:
        """Return the explanation of one request by its id, or of the last one."""
        refuse_foreign_pages(request)
        request_id = request.match_info["id"]
        explanation = self._journal.explain(request_id)
        if explanation is None:
            return json_response(404, {"error": self._journal.why_unknown(request_id)})
        return json_response(200, explanation)
