"""The admin listener's OpenAPI document: it is complete, and what is made from it gets what it promises."""

import asyncio
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from proxy.log import _is_no_clients_fault
from proxy.web.admin import Admin
from proxy.web.page import LivePage
from tests.integration.conftest import StartRig
from tests.integration.rig import Rig, question

_FOR_THE_PAGE = {"/", "/page/{name}", "/openapi.json"}


async def _document(rig: Rig) -> dict[str, Any]:
    async with rig.client.get(rig.admin_url + "/openapi.json") as reply:
        return dict(await reply.json())


async def test_every_route_is_in_the_document(start_rig: StartRig) -> None:
    routes = [*Admin.routes(_Any()), *LivePage.routes(_Any())]  # type: ignore[arg-type]
    asked = {(re.sub(r":[^/]*", "}", r.path), r.method.lower()) for r in routes}
    async with start_rig() as rig:
        paths = (await _document(rig))["paths"]
    told = {(path, method) for path, methods in paths.items() for method in methods}
    assert told == {(path, method) for path, method in asked if path not in _FOR_THE_PAGE}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/health", 405), ("GET", "/nothing", 404), ("GET", "/page/nothing.js", 404)],
)
async def test_refusal_of_any_kind_is_json(
    start_rig: StartRig, method: str, path: str, status: int
) -> None:
    async with start_rig() as rig:
        async with rig.client.request(method, rig.admin_url + path) as reply:
            assert reply.status == status and (await reply.json())["error"]
            assert "Allow" in reply.headers or status != 405


class _Any:
    """Has every handler."""

    def __getattr__(self, name: str) -> str:
        return name


async def test_requests_made_from_the_document_get_what_it_promises(
    start_rig: StartRig,
    tmp_path: Path,
    pytestconfig: pytest.Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("aiohttp.server"), "filters", [_is_no_clients_fault])
    is_long = pytestconfig.getoption("--hypothesis-profile") == "long"
    async with start_rig(n_slots=1) as rig:
        for name in "abc":
            await rig.chat(question(name))
            await rig.settled()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "schemathesis.cli", "run", rig.admin_url + "/openapi.json"),
            *("--max-examples", "2000" if is_long else "20", "--no-color", "--seed", "1"),
            *("--exclude-checks", "unsupported_method,missing_required_header"),
            # Some valid numbers and bodies ask for nothing.
            *("--exclude-checks", "positive_data_acceptance"),
            *("--suppress-health-check", "too_slow"),  # machines are busy
            cwd=tmp_path,  # it leaves its notes there
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        told, _ = await process.communicate()
        assert process.returncode == 0, told.decode()
        assert (await rig.chat(question("a"))).status == 200
