"""Who is let in where the admin listener is reached from other machines, and who is not."""

import asyncio
import stat
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from click.testing import CliRunner
from structlog.testing import capture_logs

from proxy.__main__ import main
from proxy.doctor.examination import examine
from proxy.doctor.findings import findings_of
from proxy.settings import Settings
from proxy.store.store import CheckpointStore
from tests.integration.conftest import StartRig
from tests.integration.rig import KEYS, Rig, question

EVERYWHERE = "0.0.0.0:0"
ROUTES = ("/", "/health", "/metrics", "/requests", "/checkpoints", "/overview", "/tree")


async def status(rig: Rig, path: str, method: str = "GET", **how: Any) -> int:
    async with rig.client.request(method, rig.admin_url + path, **how) as reply:
        return reply.status


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def command(rig: Rig, *arguments: str) -> tuple[int, str]:
    """Run a command against the rig, and return its exit status and what it printed."""
    admin = rig.admin_url.removeprefix("http://")
    result = await asyncio.to_thread(CliRunner().invoke, main, [*arguments, "--admin", admin])
    return result.exit_code, result.output


def kept(rig: Rig) -> Path:
    return rig.server.directory / "admin-token"


async def test_listener_beyond_loopback_answers_nobody_without_its_token(
    start_rig: StartRig,
) -> None:
    with capture_logs() as log:
        token = await is_asked_for_by_all(start_rig)
    told = [event["says"] for event in log if event["event"] == "token made"]
    assert len(told) == 1 and token in told[0]  # not again when the proxy comes back


async def is_asked_for_by_all(start_rig: StartRig) -> str:
    """Try all routes with wrong tokens and the right one; return that."""
    async with start_rig(admin=EVERYWHERE) as rig:
        await rig.chat(question("a"))
        token = kept(rig).read_text().strip()
        assert len(token) >= 32 and stat.S_IMODE(kept(rig).stat().st_mode) == 0o600
        wrong: tuple[dict[str, str], ...] = (
            {},
            bearer(""),
            bearer("wrong"),
            bearer(token[:-1]),
            {"Authorization": token},
            {"Authorization": "Basic ////"},
            {"Authorization": aiohttp.encode_basic_auth("any", "wrong")},
        )
        for headers in wrong:
            assert {await status(rig, path, headers=headers) for path in ROUTES} == {401}
            assert await status(rig, "/checkpoints/1", "DELETE", headers=headers) == 401
            assert await status(rig, "/warm", "POST", headers=headers) == 401
        async with rig.client.get(rig.admin_url) as reply:  # what makes a browser ask for it
            assert reply.headers["WWW-Authenticate"].startswith("Basic ")
        for headers in (bearer(token), {"Authorization": aiohttp.encode_basic_auth("me", token)}):
            assert await status(rig, "/", headers=headers) == 200
            assert await status(rig, "/requests", headers=headers) == 200
        # A page that gives itself a name that leads here has no token.
        assert await status(rig, "/requests", headers={"Host": "another.site"}) == 401
        named = {**bearer(token), "Host": "llm.example.org"}
        assert await status(rig, "/requests", headers=named) == 200
        elsewhere = {**bearer(token), "Origin": "http://another.site"}
        assert await status(rig, "/requests", headers=elsewhere) == 403
        await rig.stop_proxy()
        await rig.start_proxy()
        assert await status(rig, "/requests", headers=bearer(token)) == 200
        return token


async def test_health_and_metrics_are_open_where_a_setting_says_so(start_rig: StartRig) -> None:
    async with start_rig(admin=EVERYWHERE, admin_open="health, metrics") as rig:
        assert await status(rig, "/health") == await status(rig, "/metrics") == 200
        assert await status(rig, "/requests") == await status(rig, "/") == 401


async def test_loopback_asks_for_a_token_only_if_one_is_given(
    start_rig: StartRig, tmp_path: Path
) -> None:
    async with start_rig() as rig:
        assert await status(rig, "/requests") == 200 and not kept(rig).exists()
    file = tmp_path / "token"
    file.write_text(" swordfish\n")
    async with start_rig(admin_token_file=str(file)) as rig:
        assert await status(rig, "/requests") == 401 and not kept(rig).exists()
        assert await status(rig, "/requests", headers=bearer("swordfish")) == 200


async def test_commands_send_the_token_of_a_file_or_of_this_machine(
    start_rig: StartRig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with start_rig(admin=EVERYWHERE) as rig:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        exit_status, said = await command(rig, "stats")
        assert exit_status == 2 and "--admin-token-file" in said and "Traceback" not in said
        assert (await command(rig, "stats", "--admin-token-file", str(kept(rig))))[0] == 0
        monkeypatch.setenv("LLAMA_PREFIX_CACHE_SLOT_SAVE_PATH", str(rig.server.directory))
        assert (await command(rig, "ls"))[0] == 0


async def test_doctor_asks_the_proxy_with_its_token(start_rig: StartRig, tmp_path: Path) -> None:
    async with start_rig(admin=EVERYWHERE) as rig:
        wrong = tmp_path / "token"
        wrong.write_text("wrong")
        admin, directory = rig.admin_url.removeprefix("http://"), str(rig.server.directory)
        settings = Settings(slot_save_path=directory, admin=admin, admin_token_file=str(wrong))
        (finding,) = (f for f in findings_of(await examine(settings)) if f.topic == "running proxy")
        assert "--admin-token-file FILE" in finding.cure
        shown = msgspec.structs.replace(settings, admin_token_file=str(kept(rig)))
        assert (await examine(shown)).is_proxy_caching


def test_doctor_without_the_file_of_the_token_says_so(tmp_path: Path) -> None:
    told = ["doctor", "--slot-save-path", str(tmp_path), "--admin-token-file", "/nowhere"]
    with closing(CheckpointStore(tmp_path, 1 << 20)):
        result = CliRunner().invoke(main, told)
    assert result.exit_code == 2 and "admin_token_file: /nowhere: no such file" in result.output


async def test_the_token_is_nobodys_api_key(start_rig: StartRig) -> None:
    """What is warmed with the token shown is warmed for clients without a key."""
    async with start_rig(admin=EVERYWHERE) as rig:
        token = kept(rig).read_text().strip()
        body = {"messages": [{"role": "system", "content": " rule" * 300}, *question("a", 20)]}
        async with rig.client.post(
            rig.admin_url + "/warm", json=body, headers=bearer(token)
        ) as reply:
            assert b"warmed" in await reply.read()
        assert all(token not in str(seen.headers) for seen in rig.server.seen)


async def test_a_token_that_is_shown_without_need_is_nobodys_api_key(start_rig: StartRig) -> None:
    """Commands show a token that was kept when the listener asked for one; now it asks for none."""
    async with start_rig(**KEYS) as rig:
        body = {"messages": [{"role": "system", "content": " rule" * 300}, *question("a", 20)]}
        headers = bearer("kept") | {"X-Api-Key": "alice"}
        async with rig.client.post(rig.admin_url + "/warm", json=body, headers=headers) as reply:
            assert b"warmed" in await reply.read()
