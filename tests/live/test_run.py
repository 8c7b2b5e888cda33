"""`llama-prefix-cache run` as users run it: it starts the real llama-server, and leaves none behind."""

import asyncio
import json
import os
import random
import re
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from click.testing import CliRunner, Result
from structlog.testing import capture_logs

from proxy.__main__ import main
from proxy.cli.serve import _plan
from proxy.run import process
from proxy.run.process import has_amx, keep_running
from tests.lab.architectures import N_CONTEXT
from tests.lab.interleaved import HEADER, TOOLS, Conversations
from tests.lab.models import least_model
from tests.lab.processes import await_end, is_alive
from tests.lab.run import LLAMA_SERVER_ARGUMENTS, RunProcess, slots_in
from tests.lab.server import find_free_port, find_llama_server
from tests.lab.waiting import until
from tests.live.conftest import ONE_KIND
from tests.live.test_window_repair import WRONG_BAR, distance

N_BEFORE = 3
AT_DEFAULT = {"LLAMA_PREFIX_CACHE_LOG_LEVEL": "info"}

StartRun = Callable[..., RunProcess]
Refused = Callable[..., tuple[int, str]]


@pytest.fixture
def new_run(tmp_path: Path) -> Iterator[StartRun]:
    """Return a function that makes a `run`, with a directory of its own unless told otherwise."""
    made: list[RunProcess] = []

    def make(kind: str = "full", *, has_directory: bool = True, **options: Any) -> RunProcess:
        directory = tmp_path / "slots" if has_directory else None
        if directory:
            directory.mkdir(exist_ok=True, mode=0o700)
        model = least_model(kind)
        options = {"model": model, "slot_save_path": directory, **options}
        made.append(RunProcess(tmp_path / "run.log", **options))
        return made[-1]

    yield make
    for run in made:
        run.kill()


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def ask(run: RunProcess, user: str) -> dict[str, Any]:
    messages = [*HEADER, {"role": "user", "content": user}]
    body = {"messages": messages, "tools": TOOLS, "max_tokens": 4, "temperature": 0}
    return run.post("/v1/chat/completions", body)


def test_run_serves_a_cached_request_and_ctrl_c_leaves_nothing_running(
    new_run: StartRun, tmp_path: Path
) -> None:
    run = new_run(has_directory=False, environment={"XDG_CACHE_HOME": str(tmp_path / "cache")})
    run.start_and_await_caching()
    ask(run, "first")
    usage = ask(run, "second")["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] * 0.9
    assert run.stop(signal.SIGINT) == 0
    (pid,) = run.server_pids()
    assert not is_alive(pid)
    directory = tmp_path / "cache" / "llama-prefix-cache"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert list(directory.glob("*.state"))
    log = run.log_text()
    assert "-np 1 --cache-ram 0 --ctx-checkpoints 16 --metrics" in log
    assert "llama_server: listening on" in log  # llama-server's own


def test_prompt_that_goes_back_inside_a_sliding_window_is_answered_as_alone(
    new_run: StartRun,
) -> None:
    """With llama-server's default -b it is not: docs/upstream/window_purged_too_early.py."""
    run = new_run("swa")
    run.start_and_await_caching()
    assert "--metrics -b 512" in run.log_text()
    tokens = random.Random(1).choices(range(100, 3000), k=4200)
    first, second = tokens[:3100], tokens[:2800] + tokens[3100:]
    body = {"prompt": second, "n_predict": 1, "temperature": 0, "n_probs": 10}
    run.post("/completion", {"prompt": first, "n_predict": 1})
    in_slot = run.post("/completion", body)
    assert in_slot["timings"]["cache_n"] >= 2800
    alone = run.post("/completion", body | {"cache_prompt": False})
    assert distance(in_slot, alone) <= WRONG_BAR


def test_downloaded_model_gets_the_flags_that_its_file_asks_for(
    new_run: StartRun, tmp_path: Path
) -> None:
    commit = "0" * 40
    repository = tmp_path / "hub" / "models--me--swa"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit).mkdir(parents=True)
    model = least_model("swa")
    (repository / "snapshots" / commit / "swa-Q4_K_M.gguf").symlink_to(model.resolve())
    run = new_run(
        model=None,
        arguments=("-hf", "me/swa:Q4_K_M", "--offline", *LLAMA_SERVER_ARGUMENTS),
        environment={"LLAMA_CACHE": "", "HF_HUB_CACHE": str(tmp_path / "hub")},
    )
    run.start_and_await_caching()
    assert "--metrics -b 512" in run.log_text()


def test_model_that_is_not_downloaded_yet_may_have_a_window(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path))
    launch = _plan([str(find_llama_server())], ["-hf", "me/new:Q4_K_M"], {})
    assert ("-b", "512") in launch.additions


@pytest.mark.parametrize("source", [(), ("-mu", "http://127.0.0.1:1/new.gguf")])
def test_model_whose_file_is_not_here_may_have_a_window(source: tuple[str, ...]) -> None:
    """As in the container that a wrapper starts, or before a download."""
    launch = _plan([str(find_llama_server())], ["-m", "/no/such/new.gguf", *source], {})
    assert ("-b", "512") in launch.additions


@pytest.mark.parametrize(
    "arguments", [(), ("--models-dir", "models"), ("--models-preset", "models.ini")]
)
def test_router_may_serve_a_model_with_a_window(arguments: tuple[str, ...]) -> None:
    """Models of the cache too, and some that are added later."""
    launch = _plan([str(find_llama_server())], arguments, {})
    added = dict(pair for pair in launch.additions if len(pair) == 2) | launch.environment
    assert "512" in (added.get("-b"), added.get("LLAMA_ARG_BATCH"))


def test_slots_of_a_hybrid_model_are_kept_apart_on_a_cpu_with_amx(new_run: StartRun) -> None:
    run = new_run("hybrid", arguments=("-c", "16384", "-np", "2"))
    run.start_and_await_caching()
    assert ("--no-repack" in run.log_text()) == has_amx()


def test_commands_know_where_run_keeps_states_and_what_it_stands_before(
    new_run: StartRun, tmp_path: Path
) -> None:
    """Under `run` nobody has chosen the directory, llama-server's port or, here, its key."""
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    arguments = (*LLAMA_SERVER_ARGUMENTS, "--api-key", "a-key")
    options = ("--idle-save-seconds", "0.2")
    run = new_run(has_directory=False, environment=cache, options=options, arguments=arguments)

    def command(*words: str) -> Result:
        where = {"LLAMA_PREFIX_CACHE_ADMIN": run.admin_url.removeprefix("http://")}
        return CliRunner(env=cache | where).invoke(main, words)

    run.start_and_await_caching()
    headers = {"Authorization": "Bearer a-key"}
    body = {"messages": [*HEADER, {"role": "user", "content": "first"}], "max_tokens": 4}
    data = json.dumps({**body, "tools": TOOLS}).encode()
    with urlopen(Request(f"{run.base_url}/v1/chat/completions", data, headers)) as reply:
        assert reply.status == 200
    run.wait_for(lambda: run.health()["store"]["n_checkpoints"])
    doctor = command("doctor")
    assert doctor.exit_code == 0, doctor.stdout
    assert doctor.stdout.startswith("Caching will work.") and "It is caching" in doctor.stdout
    (stored,) = json.loads(command("ls", "--json").stdout)["checkpoints"]
    file = tmp_path / "out.lpc"
    assert command("export", stored["id"], "-o", str(file)).exit_code == 0 and file.exists()
    written = str(tmp_path / "written.json")
    for asking in (
        ("connect", "opencode", "--write", "--yes", "--file", written),
        ("bench", "--tokens", "512", "--yes", "--report", written),
    ):
        refused = command(*asking)
        assert refused.exit_code == 2 and "give --api-key KEY" in refused.stderr
        assert command(*asking, "--api-key", "a-key").exit_code == 0
    assert run.stop() == 0
    assert command("check").exit_code == 0
    directory = str(tmp_path / "cache" / "llama-prefix-cache")
    assert command("ls").exit_code == 69 and "DIRECTORY" in command("ls").stderr
    assert " checkpoints with" in command("ls", "--slot-save-path", directory).stdout
    assert command("doctor").exit_code == 2  # nothing runs


@ONE_KIND
def test_three_conversations_on_one_slot_go_on_after_sigterm(new_run: StartRun, kind: str) -> None:
    run = new_run(kind)
    run.start_and_await_caching()
    conversations = Conversations(run)
    for n_request in range(N_BEFORE):
        costs = conversations.tell_all(n_request)
        assert [cost for cost in costs if not cost.is_met] == []
    assert run.stop() == 0
    run.start_and_await_caching()
    costs = conversations.tell_all(N_BEFORE)
    assert [cost for cost in costs if not cost.is_met] == []
    assert all(cost.n_new < cost.n_prompt / 5 for cost in costs)
    assert run.stop() == 0
    assert not any(map(is_alive, run.server_pids()))


def test_turn_start_survives_a_tool_loop_with_few_context_checkpoints(new_run: StartRun) -> None:
    """llama-server drops the turn start's own context checkpoint after three requests."""
    run = new_run("hybrid")
    run.start_and_await_caching()
    conversations = Conversations(run, n_conversations=1, n_calls=5)
    costs = [conversations.tell_all(n_request)[0] for n_request in range(7)]
    assert [cost for cost in costs if not cost.is_met] == []


def test_second_signal_does_not_wait_for_a_running_request(new_run: StartRun) -> None:
    run = new_run(options=("--drain-seconds", "600"), environment=AT_DEFAULT)
    run.start_and_await_caching()
    endless = {"prompt": "a", "n_predict": -1, "ignore_eos": True, "cache_prompt": True}
    with ThreadPoolExecutor() as client:
        asked = client.submit(run.post, "/completion", endless)
        run.wait_for(lambda: slots_in(run.health()) == {"leased": 1})
        server = child_of(run.pid)
        run.send(signal.SIGTERM)
        told = "finishing requests (1), then saving slots: at most 600 s each; Ctrl-C again waits"
        run.wait_for(lambda: told in run.log_text())
        assert run.stop() == 130
        assert asked.exception() is not None
    assert "Traceback" not in run.log_text()
    await_end([server])


def test_terminal_that_is_closed_cuts_nothing_short(new_run: StartRun) -> None:
    """It sends SIGHUP twice: its shell does, and then the kernel when the shell ends."""
    run = new_run(options=("--drain-seconds", "600"), environment=AT_DEFAULT)
    run.start_and_await_caching()
    long = {"prompt": "a", "n_predict": 1500, "ignore_eos": True, "cache_prompt": True}
    with ThreadPoolExecutor() as client:
        asked = client.submit(run.post, "/completion", long)
        run.wait_for(lambda: slots_in(run.health()) == {"leased": 1})
        run.send(signal.SIGHUP)
        run.wait_for(lambda: "finishing requests (1)" in run.log_text())
        run.send(signal.SIGHUP)
        assert asked.result()["tokens_predicted"] == 1500
        assert run.ended() == 0
    assert "another signal" not in run.log_text()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_llama_server_that_dies_ends_the_run_with_its_status(
    new_run: StartRun, tmp_path: Path, number: signal.Signals
) -> None:
    """What llama-server has logged of its requests does not say why."""
    run = new_run(environment=AT_DEFAULT)
    run.start_and_await_caching()
    ask(run, "first")
    os.kill(child_of(run.pid), number)
    assert run.ended() == 70
    *_, last, hint = run.log_text().splitlines()
    assert f"llama-server died: killed by {number.name}" in last
    assert hint == "`run --restart` starts it again when it dies"


def test_llama_server_that_dies_is_started_again_with_restart(new_run: StartRun) -> None:
    run = new_run("hybrid", options=("--restart", "--idle-save-seconds", "0.2"))
    run.start_and_await_caching()
    ask(run, "first")
    run.wait_for(lambda: run.health()["store"]["n_checkpoints"])
    os.kill(run.server_pids()[0], signal.SIGKILL)
    run.wait_for(lambda: len(run.server_pids()) == 2)
    run.wait_for(lambda: run.log_text().count("llama-server is ready") == 2)
    run.wait_for(lambda: run.health()["servers"])
    usage = ask(run, "second")["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] * 0.9
    assert run.stop() == 0
    assert not any(map(is_alive, run.server_pids()))


def test_proxy_that_is_killed_takes_llama_server_along(new_run: StartRun) -> None:
    run = new_run()
    run.start_and_await_caching()
    (pid,) = run.server_pids()
    os.kill(pid, signal.SIGSTOP)  # answers no signal that it could handle itself
    assert is_alive(pid)
    run.kill()
    await_end(run.server_pids())


def test_model_that_cannot_be_loaded_ends_the_run(new_run: StartRun) -> None:
    run = new_run(model=Path("/no/such/model.gguf"), options=("--restart",))
    run.start()
    assert run.ended() == 70
    assert "failed to open GGUF file '/no/such/model.gguf'" in run.log_text()
    assert len(run.server_pids()) == 1


def test_healthy_run_looks_healthy(new_run: StartRun) -> None:
    run = new_run(environment=AT_DEFAULT)
    run.start_and_await_caching()
    ask(run, "first")
    ask(run, "second")
    run.wait_for(lambda: run.log_text().count(" chat ") == 2)  # both have ended
    assert run.stop() == 0
    text = run.log_text().replace("\n          ", "; ")
    lines = [line.split("  ", 1) for line in text.splitlines()]
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d", time) for time, _ in lines)
    page, clients = run.admin_url, run.base_url
    expected = (
        r"starting llama-server: full-least.gguf, 1 slot of 16,384 tokens; added: --slot-save-path .*",
        r"caching full-least.gguf: 1 slot of 16,384 tokens",
        rf"ready: clients {clients}/v1 \(Anthropic: {clients}\), live page {page}; connect OpenCode, .*"
        rf" connect opencode --admin {page.removeprefix('http://')}",
        r"chat  [\d,]+ tokens, 0 reused \(0.0 %\), answered in [\d.]+ m?s  slot 0  new",
        r"chat  [\d,]+ tokens, [\d,]+ reused \(9\d.\d %\), answered in [\d.]+ m?s, saved .* slot 0.*",
        r"saving slots: at most 30 s; Ctrl-C again waits no longer",
        r"stopped",
    )
    assert len(lines) == len(expected), run.log_text()
    for (_, words), pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, words), words


def test_context_that_the_model_does_not_have_is_told(new_run: StartRun) -> None:
    arguments = ("-c", str(2 * N_CONTEXT), *LLAMA_SERVER_ARGUMENTS[2:])
    run = new_run(arguments=arguments, environment=AT_DEFAULT)
    run.start_and_await_caching()
    assert run.stop() == 0
    told = f"llama-server gives {N_CONTEXT:,} tokens a slot, not {2 * N_CONTEXT:,}"
    assert f"warning: {told}: the model has no longer context" in run.log_text()


def test_ready_is_told_once_first_contact_has_ended(new_run: StartRun) -> None:
    """And once only: the first request meets a llama-server that is attached."""
    run = new_run("hybrid")
    run.start()
    run.wait_for(lambda: "llama-server is ready" in run.log_text())
    assert run.health()["state"] == "caching"
    told = re.findall("attached to llama-server|llama-server is ready", run.log_text())
    assert told == ["attached to llama-server", "llama-server is ready"]
    assert run.stop() == 0


def test_router_is_ready_before_any_model_is_loaded(new_run: StartRun, tmp_path: Path) -> None:
    arguments = (*LLAMA_SERVER_ARGUMENTS, "--models-dir", str(tmp_path))
    run = new_run(model=None, arguments=arguments)
    run.start()
    run.wait_for(lambda: "llama-server is ready" in run.log_text())
    assert run.stop() == 0


def test_model_that_is_missing_is_one_sentence(new_run: StartRun) -> None:
    run = new_run(model=Path("/no/such/model.gguf"), environment=AT_DEFAULT)
    run.start()
    assert run.ended() == 70
    _, *told = run.log_text().splitlines()
    assert told == ["llama-prefix-cache: there is no model file /no/such/model.gguf"]


def test_download_that_fails_is_told_in_place_of_the_file(new_run: StartRun) -> None:
    arguments = ("-mu", "http://127.0.0.1:1/new.gguf", *LLAMA_SERVER_ARGUMENTS)
    run = new_run(model=Path("/no/such/model.gguf"), arguments=arguments, environment=AT_DEFAULT)
    run.start()
    assert run.ended() == 70
    assert "failed to download model" in run.log_text()


def test_file_that_only_a_container_has_is_not_blamed(new_run: StartRun, tmp_path: Path) -> None:
    wrapper = tmp_path / "wrapper"
    helps = f'[ "$1" = --help ] && exec {find_llama_server()} --help'
    wrapper.write_text(f"#!/bin/sh\n{helps}\necho error: out of memory\nexit 1\n")
    wrapper.chmod(0o700)
    model = Path("/no/such/model.gguf")
    run = new_run(model=model, program=wrapper, environment=AT_DEFAULT)
    run.start()
    assert run.ended() == 70
    said = run.log_text()
    assert "exit status 1" in said and "out of memory" in said
    assert "no model file" not in said


def test_end_of_llama_server_is_told_with_its_last_words(new_run: StartRun, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"no model")
    run = new_run(model=tmp_path / "model.gguf", environment=AT_DEFAULT)
    run.start()
    assert run.ended() == 70
    said = run.log_text()
    assert "died before it was ready: exit status 1" in said and "failed to load model" in said
    assert len(said.splitlines()) <= 12


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Return a function that has `run` refuse in this process, and returns the status and what is said.

    Of llama-server only --help is run: what starts it after all ends, and fails the test.
    """
    program, started = tmp_path / "program", tmp_path / "started"
    helps = f'[ "$1" = --help ] && exec {find_llama_server()} --help'
    program.write_text(f"#!/bin/sh\n{helps}\ntouch {started}\nexit 1\n")
    program.chmod(0o700)
    (tmp_path / "slots").mkdir(mode=0o700)
    for name in os.environ:
        if name.startswith(("LLAMA_PREFIX_CACHE_", "LLAMA_ARG_")):
            monkeypatch.delenv(name)

    def refused(
        *arguments: str, environment: dict[str, str] | None = None, **options: str
    ) -> tuple[int, str]:
        settings = {"slot_save_path": str(tmp_path / "slots"), "listen": "127.0.0.1:0", **options}
        given = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        words = ["run", "--admin=127.0.0.1:0", *given, "--", str(program), *arguments]
        result = CliRunner(env=environment).invoke(main, words)
        assert not started.exists(), result.output
        return result.exit_code, result.output

    return refused


@pytest.mark.parametrize(
    ("arguments", "environment", "named"),
    [
        (("--slot-save-path", "/elsewhere"), {}, "--slot-save-path /elsewhere"),
        ((), {"LLAMA_ARG_HOST": "/run/llama.sock"}, "LLAMA_ARG_HOST=/run/llama.sock"),
    ],
)
def test_conflict_is_named_and_nothing_is_started(
    refused: Refused, arguments: tuple[str, ...], environment: dict[str, str], named: str
) -> None:
    status, said = refused(*arguments, environment=environment)
    assert status == 2 and named in said


def test_option_of_the_proxy_behind_the_command_is_named(refused: Refused) -> None:
    status, said = refused("--listen=127.0.0.1:1", "--config", "a.yaml")
    assert status == 2
    assert said.splitlines()[-2:] == [
        f"  {each} is for the proxy: put it before `--`" for each in ("--listen", "--config")
    ]


def test_llama_server_that_only_tells_its_version_has_not_died(new_run: StartRun) -> None:
    run = new_run(arguments=("--version",), environment=AT_DEFAULT)
    run.start()
    assert run.ended() == 0
    assert "version: " in run.log_text() and "llama-prefix-cache" not in run.log_text()


def test_file_in_place_of_the_directory_is_named_as_one(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    status, said = refused(slot_save_path=str(tmp_path / "file"))
    assert status == 2 and f"{tmp_path / 'file'} is not a directory" in said


def test_port_of_the_proxy_itself_is_refused(refused: Refused) -> None:
    port = str(find_free_port())
    status, said = refused("--port", port, listen=f"127.0.0.1:{port}")
    assert (
        status == 2 and f":{port} is the proxy's own `listen`" in said and "another --port" in said
    )


def test_port_of_llama_server_that_is_taken_is_said_before_anything_is_started(
    refused: Refused,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, said = refused("--port", port)
    assert status == 69 and port in said


async def test_start_that_takes_long_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """A download writes its progress over and over into one line."""

    async def is_ready() -> bool:
        return False

    monkeypatch.setattr(process, "TELL_SECONDS", 0.0)
    script = r"printf 'Downloading 11 %%\rDownloading 12 %%\r'; exec sleep 300"
    with capture_logs() as log:
        running = asyncio.ensure_future(
            keep_running(
                ["sh", "-c", script], {}, is_ready, restarts=False, is_shown=False, says_ready=""
            )
        )
        told = "llama-server is starting: Downloading 12 %"
        await until(lambda: any(line.get("says") == told for line in log))
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
