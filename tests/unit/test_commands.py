"""What commands are told in words: ids, ages, sizes, and the requests that only warm."""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import redirect_stdout
from datetime import datetime
from inspect import unwrap
from io import StringIO
from pathlib import Path
from ssl import SSLError
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click import BadParameter
from click.testing import CliRunner

from proxy.__main__ import main
from proxy.cli.command import (
    DirectoryStore,
    RunningProxy,
    age_in_words,
    checkpoints_in_words,
    console,
    table_of,
)
from proxy.cli.look import explanation_text, stats_rows
from proxy.cli.serve import _listeners
from proxy.cli.store import age_seconds, ls, named
from proxy.core.model import CheckpointId, CheckpointKind, Family
from proxy.core.rates import size_in_words
from proxy.errors import in_words
from proxy.explain.causes import Cause
from proxy.explain.sketch import shortened
from proxy.explain.views import Explanation, ListedCheckpoint, RequestRecord, Today, list_checkpoint
from proxy.llama.requests import generation_route, header_request, parse_body, route_path
from proxy.settings import NAMES, Settings
from proxy.store.directory import keep_proxies_out
from tests.unit.builders import NAMESPACE, OTHER_NAMESPACE, checkpoint

Capture = pytest.CaptureFixture[str]
HEADER, SESSION = 0x5D3A90C2F1E84B07, 0x1B70C4D2A9E6F358
STORED = [
    checkpoint(100, id=CheckpointId(0xABCD << 48 | 1), family=Family(HEADER, SESSION)),
    checkpoint(200, id=CheckpointId(0xABCD << 48 | 2), family=Family(HEADER, 0), is_pinned=True),
    checkpoint(300, id=CheckpointId(0xFFFF << 40), last_used_at=500.0, namespace=OTHER_NAMESPACE),
]
LISTED = [list_checkpoint(stored, {OTHER_NAMESPACE: "coder"}) for stored in STORED]


def names(text: str) -> list[int]:
    found: list[ListedCheckpoint] = named(text, LISTED)
    return [checkpoint.n_tokens for checkpoint in found]


def refused(text: str, checkpoints: list[ListedCheckpoint], capsys: Capture) -> str:
    """Return what is said of a name that names nothing, or too much."""
    with pytest.raises(SystemExit):
        named(text, checkpoints)
    return capsys.readouterr().err


def test_few_digits_name_a_checkpoint_or_all_under_a_node(capsys: Capture) -> None:
    assert names("abcd000000000001") == [100]
    assert names("ABCD000000000002") == [200]
    assert names("1b70c4d2") == [100]
    assert names("5d3a") == [100, 200]
    assert names(NAMESPACE.hex()[:6]) == [100, 200]
    assert names(OTHER_NAMESPACE.hex()) == names("00ffff") == names("coder") == [300]
    for text, complaint in (
        ("abcd", "2 ids"),
        ("5d3", "too short"),
        ("1234", "no model"),
        ("0000", "no model"),  # what is not known is no name
        ("nonsense", "no model"),
    ):
        assert complaint in refused(text, LISTED, capsys)


def test_sizes_and_ages_in_words() -> None:
    sizes = {0: "0 bytes", 1023: "1023 bytes", 1536: "1.5 KiB", 3 << 30: "3.0 GiB"}
    assert {n: size_in_words(n) for n in sizes} == sizes
    ages = {-5: "0 s ago", 59: "59 s ago", 60: "1 min ago", 7200: "2 h ago", 90000: "25 h ago"}
    assert {n: age_in_words(n) for n in ages} == ages
    assert age_in_words(3 * 86400) == "3 d ago"
    lengths = {"90s": 90, "30m": 1800, "12h": 43200, "7d": 604800, "2w": 1209600}
    assert {text: age_seconds(text) for text in lengths} == lengths
    for text in ("7", "d", "-1d", "1.5h", "7 days"):
        with pytest.raises(BadParameter):
            age_seconds(text)
    assert checkpoints_in_words(1, 1536) == "1 checkpoint with 1.5 KiB"
    assert checkpoints_in_words(2000, 0) == "2,000 checkpoints with 0 bytes"


SYSTEM, USER = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
DEVELOPER = {"role": "developer", "content": "d"}
CHAT = {"messages": [SYSTEM, USER, USER], "tools": [{"type": "function"}], "stream": True, "n": 2}
MESSAGES = {
    "system": "s",
    "messages": [USER, USER],
    "max_tokens": 99,
    "tools": [{"input_schema": {}}],
}
RESPONSES = {"instructions": "i", "input": [DEVELOPER, USER, USER], "max_output_tokens": 99}
ONE_TOKEN = {"max_tokens": 1, "max_output_tokens": 1, "n_predict": 1}
COMPLETION = {"prompt": [1, 2], "n_predict": 99, "max_tokens": 99}


def warmed(body: dict[str, Any], *, is_whole: bool = False) -> tuple[str, dict[str, Any]]:
    parsed = parse_body(json.dumps(body).encode())
    assert parsed is not None
    path = route_path(parsed)
    route = generation_route("POST", path)
    assert route is not None
    fields: dict[str, Any] = json.loads(header_request(route, parsed, is_whole=is_whole))
    return path, fields


def test_body_is_cut_to_its_header_and_one_token() -> None:
    other = {"role": "user", "content": "(warmed)"}
    path, fields = warmed(CHAT)
    assert path == "/v1/chat/completions"
    assert fields == {"messages": [SYSTEM, other], "tools": CHAT["tools"], **ONE_TOKEN}
    path, fields = warmed(MESSAGES)
    assert path == "/v1/messages"
    assert fields == {**MESSAGES, "messages": [other], **ONE_TOKEN}
    path, fields = warmed(RESPONSES)
    assert path == "/v1/responses"
    assert fields == {**RESPONSES, "input": [DEVELOPER, other], **ONE_TOKEN}
    assert warmed({"input": "text"})[1]["input"] == [other]
    assert warmed({"messages": 5})[1]["messages"] == [other]
    path, fields = warmed(COMPLETION)
    assert (path, fields) == ("/completion", {"prompt": [1, 2], **ONE_TOKEN})
    assert warmed(CHAT, is_whole=True)[1]["messages"] == CHAT["messages"]
    assert warmed({"messages": [USER]})[0] == "/v1/chat/completions"
    for odd in (5, [5], ["input_schema"], [{"input_schema": None}]):
        assert warmed({"messages": [USER], "tools": odd})[0] == "/v1/chat/completions"
    nothing = parse_body(b'{"nothing": 1}')
    assert nothing is not None and route_path(nothing) == ""


def record(server: str | None, confirmed: int, evaluated: int) -> RequestRecord:
    return RequestRecord(
        id="5f0c1a2b",
        at=0.0,
        path="/v1/messages",
        outcome="hit",
        cause=Cause.HIT,
        server=server,
        confirmed=confirmed,
        evaluated=evaluated,
        seconds=0.1,
    )


def test_stats_are_those_of_the_live_page_in_lines() -> None:
    today = Today(since=0.0, n_requests=3, n_reusing=2, n_prompt=1000, n_reused=900)
    slots = [{"state": "known"}, {"state": "empty"}, {"state": "known"}]
    servers = [
        {"name": name, "rule": "any prefix", "slots": slots[:n]} for name, n in (("", 3), ("b", 2))
    ]
    overview: dict[str, Any] = {
        "state": "caching",
        "since": "2026-11-23T11:00:00Z",
        "store": None,
        "servers": servers,
        "reasons": [],
        "in_flight": [],
    }
    rows = list(stats_rows(overview | {"today": msgspec.to_builtins(today)}))
    noon = datetime.fromtimestamp(1795431600)  # local time, like all times that people read
    assert rows[0] == ("the proxy", f"is caching since {noon:%Y-%m-%d %H:%M}")
    assert ("llama-server", "rule: any prefix; slots: 1 empty, 2 known") in rows
    assert ("llama-server b", "rule: any prefix; slots: 1 empty, 1 known") in rows
    assert ("prompt tokens", "1,000, of which 900 reused (90%)") in rows
    assert ("missed", "nothing") in rows
    assert ("time saved", "nothing yet") in rows
    today = Today(since=0.0, n_requests=3, n_missing=1, n_missed=70, saved_seconds=-0.002)
    rows = list(stats_rows(overview | {"today": msgspec.to_builtins(today)}))
    says = "70 known tokens, in 1 of the requests: `explain miss` says why"
    assert ("missed", says) in rows
    assert ("time saved", "nothing yet") in rows, "restores that took longer are no saving below 0"
    today = Today(since=0.0, n_prompt=1000, n_reused=900, n_restored=300, saved_seconds=9.0)
    rows = list(stats_rows(overview | {"today": msgspec.to_builtins(today)}))
    assert ("restored", "300 of the reused tokens; the others were in slots") in rows
    assert ("time saved", "9.0 s of evaluation, by all reused tokens") in rows
    store = {"n_checkpoints": 1, "size_bytes": 1536, "max_bytes": 2048}
    rows = list(stats_rows(overview | {"store": store, "today": msgspec.to_builtins(today)}))
    assert rows[1] == ("stored", "1 checkpoint with 1.5 KiB of 2.0 KiB")
    asked = {"title": "mend the login", "client": "OpenCode 1.18"}
    running = {"phase": "evaluates", "n_prompt": 51_200, "n_done": 8192, "at": time.time()}
    unnamed = running | {"title": "", "client": "", "path": "/completion"}
    unread = asked | running | {"n_prompt": None, "n_done": None}
    overview["in_flight"] = [asked | running, unread, unnamed]
    rows = list(stats_rows(overview | {"today": msgspec.to_builtins(today)}))
    evaluates, told, of_path = [row[1] for row in rows if row[0] == "in flight"]
    assert of_path.startswith("/completion: evaluates")
    named = '"mend the login", OpenCode 1.18: evaluates'
    assert evaluates == f"{named}, 8,192 of 51,200 tokens, came 0 s ago"
    assert told == f"{named}, came 0 s ago"
    overview["reasons"] = [{"reason": "There is no room.", "cure": "Free some."}]
    rows = list(stats_rows(overview | {"today": msgspec.to_builtins(today)}))
    assert rows[1] == ("", "There is no room. Free some.")


def test_client_of_a_proxy_without_a_model_is_told_what_is_missing(capsys: Capture) -> None:
    reason = {"reason": "llama-server does not answer.", "cure": "Start llama-server."}
    told = {"servers": [], "listen": ":8081", "reasons": [reason], "state": "forwarding"}
    with pytest.raises(SystemExit):
        RunningProxy("127.0.0.1:1").for_clients(told, None, "none")
    assert "answer. Start llama-server." in capsys.readouterr().err


def test_model_of_a_router_is_the_one_that_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    models = {"data": [{"id": "aaa"}, {"id": "coder"}]}
    monkeypatch.setattr(RunningProxy, "ask", lambda *_: models)
    coder = {"name": "coder", "n_ctx": 4096}
    told = {"servers": [{"name": "zzz", "n_ctx": 512}, coder]}
    server = RunningProxy("127.0.0.1:1")
    assert server.model_that_runs(told) == ({"id": "coder"}, [coder])
    assert server.model_that_runs(told, "") == ({"id": "coder"}, [coder])
    assert server.model_that_runs(told, "coder") == ({"id": "coder"}, [coder])
    of_one = {"servers": [{"name": "127.0.0.1:8080", "n_ctx": 512}]}
    assert server.model_that_runs(of_one) == ({"id": "aaa"}, of_one["servers"])
    with pytest.raises(SystemExit):
        server.model_that_runs({"servers": []}, "nosuch")
    assert "--model NAME` loads one of aaa, coder" in capsys.readouterr().err
    models["data"].clear()
    with pytest.raises(SystemExit):
        server.model_that_runs({"servers": []})
    assert "there is none: give llama-server -m FILE or --models-dir" in capsys.readouterr().err


def test_url_of_a_client_is_taken_as_an_address(capsys: Capture) -> None:
    for url in ("127.0.0.1:1", "http://127.0.0.1:1", "http://127.0.0.1:1/v1/"):
        assert RunningProxy(url).address == "127.0.0.1:1"
    with pytest.raises(SystemExit) as ended:
        RunningProxy("http://127.0.0.1:1/other").text("/metrics")
    said = capsys.readouterr().err
    assert ended.value.code == 69 and "--admin HOST:PORT" in said
    assert "only http://HOST:PORT can be asked" in said and "nonnumeric" not in said


def test_fault_of_tls_is_told_in_its_own_words() -> None:
    assert in_words(SSLError(1, "[SSL] wrong version number")) == "[SSL] wrong version number"


def test_server_that_does_not_answer_is_named_as_it_was_given(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp":0,"input_length":9,"output_length":1,"hash_ids":[0]}')
    for url in ("http://127.0.0.1:1", "https://127.0.0.1:1"):
        done = CliRunner().invoke(main, ["trace", "replay", str(trace), url])
        said = (
            f"nothing answers at {url}: connection refused. Check the URL, and that the server runs"
        )
        assert (done.exit_code, done.output) == (69, f"llama-prefix-cache: {said}\n")


def test_words_of_users_are_no_markup(capsys: Capture) -> None:
    console().print(table_of([("conversation", '"mend [/INST] and [red]this[/red] :bug:"')]))
    assert '"mend [/INST] and [red]this[/red] :bug:"' in capsys.readouterr().out


def test_table_has_nothing_that_a_terminal_obeys(capsys: Capture) -> None:
    console().print(table_of([("a\x1b[31mb", "c\x9b2J\nd")]))
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["a�[31mb", "c�2J"],
        ["d"],
    ]


def test_explanation_names_the_llama_server_where_there_are_several() -> None:
    def first_line(server: str | None) -> str:
        explanation = Explanation(request=record(server, 90, 10), says="", cure="")
        return explanation_text(explanation).plain.splitlines()[0]

    assert first_line("full") == "hit  5f0c1a2b  /v1/messages  by full"
    assert first_line(None) == "hit  5f0c1a2b  /v1/messages"


def test_request_that_has_reused_all_that_was_known_is_not_called_a_miss() -> None:
    few = msgspec.structs.replace(record(None, 60, 900), outcome="miss")
    told = explanation_text(Explanation(request=few, says="", cure="")).plain.splitlines()
    assert told[0].startswith("hit  ") and "cause: hit" in told


def test_error_that_is_explained_has_nothing_that_a_terminal_obeys() -> None:
    why = {"cause": Cause.REFUSED, "why": "Unexpected message role: \x1b[31m"}
    refused = msgspec.structs.replace(record(None, 0, 0), **why)
    told = explanation_text(Explanation(request=refused, says="", cure="")).plain
    assert "error: Unexpected message role: \ufffd[31m" in told


def test_config_says_what_is_in_force_and_where_it_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("drain_seconds: 7\nlog_level: debug\nstabilizers: [safe, sticky_date]\n")
    environment = {
        "LLAMA_PREFIX_CACHE_LOG_LEVEL": "error",
        "LLAMA_PREFIX_CACHE_UPSTREAM_API_KEY": "secret",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    flags = ["--config", str(file), "--admin", "http://127.0.0.1:9/", "--max-store-bytes", "20GB"]
    result = CliRunner(env=environment).invoke(main, ["config", "--json", *flags])
    told = {name: (row["value"], row["from"]) for name, row in json.loads(result.output).items()}
    assert told.keys() == set(NAMES) and "secret" not in result.output
    assert told["drain_seconds"] == ("7", str(file)) and told["log_level"] == (
        "error",
        "environment",
    )
    assert told["stabilizers"] == ("safe, sticky_date", str(file))
    assert told["admin"] == ("127.0.0.1:9", "command line")
    assert told["max_store_bytes"] == ("20000000000", "command line")
    assert told["slot_save_path"] == (
        str(tmp_path / "llama-prefix-cache"),
        "default of run and doctor",
    )
    shown = CliRunner(env=environment).invoke(main, ["config", *flags]).output
    assert re.search(r"^log_level +error +environment *", shown, re.M)


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", "gr\xfc\xdfe ✓"), ("latin-1", "gr\xfc\xdfe ?")]
)
def test_terminal_that_lacks_letters_is_shown_the_others(encoding: str, shown: str) -> None:
    """click writes UTF-8 where Python was told nothing better than ASCII."""
    command = [sys.executable, "-m", "proxy", "config", "--admin-token-file", "gr\xfc\xdfe ✓"]
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(command, capture_output=True, env=env, check=True)
    printed = done.stdout.decode("latin-1" if encoding == "latin-1" else "utf-8")
    assert re.search(rf"^admin_token_file +{re.escape(shown)} +command line$", printed, re.M)
    assert not re.search(" $", printed, re.M)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("bench", "--report", "r.json", "--tokens", "0"), "0 is not in the range x>=1"),
        (("trace", "replay", "t.jsonl", "http://a", "--speed", "-1"), "not in the range x>=0"),
        (("connect", "opencode", "--write", "--undo"), "--write and --undo are opposites"),
    ],
)
def test_impossible_argument_is_refused(arguments: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2 and said in done.output


@pytest.mark.parametrize("milliseconds", [-1, 10**15, 10**400], ids=["before", "late", "huge"])
def test_trace_with_impossible_times_is_refused(tmp_path: Path, milliseconds: int) -> None:
    trace = tmp_path / "trace.jsonl"
    row = {"timestamp": milliseconds, "input_length": 9, "output_length": 1, "hash_ids": [0]}
    trace.write_text(json.dumps(row))
    for arguments in (["show", str(trace)], ["replay", str(trace), "http://127.0.0.1:1"]):
        done = CliRunner().invoke(main, ["trace", *arguments])
        assert (done.exit_code, done.output.count("\n")) == (2, 1) and str(trace) in done.output


@pytest.mark.parametrize("switch", ["--json", ""])
def test_output_to_a_full_disk_ends_with_one_sentence(switch: str) -> None:
    environment = {n: value for n, value in os.environ.items() if n != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "proxy", "config", *switch.split()],
            env=environment,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (done.returncode, done.stderr) == (1, "llama-prefix-cache: no space left on device\n")


def test_run_says_why_llama_server_shows_no_help(tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\necho\necho error with LLAMA_ARG_PORT: stoi\nexit 1\n")
    program.chmod(0o755)
    done = CliRunner().invoke(main, ["run", "--", str(program)])
    assert done.exit_code == 2 and "its --help says: error with LLAMA_ARG_PORT: stoi" in done.output


@pytest.mark.parametrize("words", ["trace export", "export abcd -o", "bench --report"])
def test_completion_of_a_line_with_a_file_asks_nothing(tmp_path: Path, words: str) -> None:
    file = tmp_path / "there"
    file.touch()
    line = f"llama-prefix-cache {words} {file} --"
    asked = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    completing = {**asked, "_LLAMA_PREFIX_CACHE_COMPLETE": "bash_complete"}
    done = CliRunner(env=completing).invoke(main, prog_name="llama-prefix-cache")
    assert "Nothing was done" not in done.output and "--yes" in done.output


def test_user_without_a_home_needs_none_where_the_directory_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    done = CliRunner().invoke(main, ["config", "--slot-save-path", str(tmp_path)])
    assert done.exit_code == 0
    done = CliRunner().invoke(main, ["check"])
    assert done.exit_code == 2 and "set HOME, or give --slot-save-path" in done.output


def test_directory_of_an_unknown_user_is_no_directory() -> None:
    for path in ("~nosuchuser/x", "~nosuchuser"):
        done = CliRunner().invoke(main, ["check", "--slot-save-path", path])
        assert done.exit_code == 2 and f"{path} is not a directory" in done.output


def test_key_that_no_header_takes_is_refused_in_words(capsys: Capture) -> None:
    for key in ("\u043a\u043b\u044e\u0447", "a\nb"):
        with pytest.raises(SystemExit) as ended:
            RunningProxy("127.0.0.1:1", key).text("/metrics")
        assert ended.value.code == 2 and "HTTP does not carry" in capsys.readouterr().err


def test_config_shows_long_values_whole_and_whose_default_the_directory_is(tmp_path: Path) -> None:
    long = "safe, " * 20 + "-keep_tool_order"
    environment = {"XDG_CACHE_HOME": str(tmp_path / ("a" * 90)), "COLUMNS": "80"}
    done = CliRunner(env=environment).invoke(main, ["config", "--stabilizers", long])
    said = "".join(done.output.split())
    assert done.exit_code == 0 and "…" not in said and "a" * 60 in said
    assert "defaultofrun" in said


def test_wrong_setting_that_is_found_out_late_has_the_exit_status_of_the_others(
    tmp_path: Path,
) -> None:
    wrong = f"url=file://{tmp_path},key_file={tmp_path}/none"
    where = ("--slot-save-path", str(tmp_path), "--shared-store", wrong)
    done = CliRunner().invoke(main, ["serve", *where])
    assert (done.exit_code, "key_file" in done.output) == (2, True)


@pytest.mark.parametrize("command", ["serve", "doctor"])
@pytest.mark.parametrize(
    ("upstream", "name"),
    [
        ("http://127.0.0.1:8091", "listen"),
        ("http://a:1, http://localhost:8092/v1", "admin"),
        ("http://127.0.0.1:8092", "admin"),
    ],
)
def test_upstream_that_is_the_proxy_itself_is_refused(
    tmp_path: Path, command: str, upstream: str, name: str
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        f"slot_save_path: {tmp_path}\nlisten: 0.0.0.0:8091\nadmin: localhost:8092\n"
        f"upstream: {upstream}\n"
    )
    done = CliRunner().invoke(main, [command, "--config", str(config)])
    assert done.exit_code == 2 and f"is the proxy's own `{name}`" in done.output


@pytest.mark.parametrize(
    "second", ["http://127.0.0.1:1", "http://127.0.0.1:1/", "http://localhost:1"]
)
def test_llama_server_that_is_named_twice_is_refused(tmp_path: Path, second: str) -> None:
    """Two would believe that they alone use its slots. Models under one address are another matter."""
    upstream = f"http://127.0.0.1:1, {second}"
    told = ["doctor", "--slot-save-path", str(tmp_path), "--upstream"]
    done = CliRunner().invoke(main, [*told, upstream])
    assert done.exit_code == 2 and "one address is there twice" in done.output
    done = CliRunner().invoke(main, [*told, upstream + "/upstream/a"])
    assert "one address is there twice" not in done.output


@pytest.mark.parametrize("command", ["doctor", "check", "export 5d3a90c2 -o /dev/null --yes"])
def test_upstream_that_is_not_asked_may_be_the_proxy_itself(tmp_path: Path, command: str) -> None:
    """`run` listens there, and starts llama-server elsewhere; doctor asks the proxy that runs."""
    config = tmp_path / "config.yaml"
    config.write_text(f"slot_save_path: {tmp_path}\nlisten: 127.0.0.1:8080\nadmin: 127.0.0.1:1\n")
    with keep_proxies_out(tmp_path, creates_lock=command == "doctor"):
        done = CliRunner().invoke(main, [*command.split(), "--config", str(config)])
    said = {"doctor": "No proxy tells its health", "check": "there is no store in"}
    words = said.get(command, "there is no state in")
    assert done.exit_code == 1 and words in done.output


def listing(*listed: ListedCheckpoint) -> str:
    """Return what `ls` prints of these checkpoints."""

    class Listing(DirectoryStore):
        def __init__(self) -> None:
            pass

        def checkpoints(self) -> list[ListedCheckpoint]:
            return list(listed)

    printed = StringIO()
    with redirect_stdout(printed):
        assert ls.callback is not None
        with ls.make_context("ls", []):
            unwrap(ls.callback)(Listing(), None, False)
    return printed.getvalue()


@pytest.mark.parametrize(
    ("n_tokens", "said"), [(0, "headers not told apart"), (1, "no header"), (9, "header, 9 tokens")]
)
def test_header_that_was_not_looked_for_is_not_called_unknown(n_tokens: int, said: str) -> None:
    parent = f"{NAMESPACE.hex()}/{0 if n_tokens < 2 else 7 << 60:016x}/{SESSION:016x}"
    one = msgspec.structs.replace(LISTED[0], parent=parent, n_header_tokens=n_tokens)
    assert re.search(rf"^.── {said}, .* ago{'  7000' if n_tokens > 1 else '$'}", listing(one), re.M)
    assert " 0000" not in listing(one)  # it names nothing


def test_names_from_elsewhere_cannot_give_the_terminal_orders() -> None:
    """A client names any model, and an imported file any client."""
    order = "\x1b]0;gone\x07\x9b31m"
    assert shortened(order, 40) == "�]0;gone��31m" and shortened(order, 5) == "�]0;…"
    one = msgspec.structs.replace(LISTED[0], model=order, client=order, title=order)
    assert not re.search(
        r"[\x1b\x07\x9b]", listing(msgspec.structs.replace(one, n_header_tokens=9))
    )


def test_ls_fits_80_columns() -> None:
    """With large numbers, under another model's namespace."""
    kinds = [kind.value for kind in CheckpointKind]
    listed = [
        msgspec.structs.replace(
            LISTED[0], id=f"{n:016x}", parent=f"{'9f' * 16}/{n % 2 + 1:016x}/{n + 9:016x}", kind=kind,
            model="Qwen3-Coder-480B-A35B-Instruct-UD-Q4_K_XL", n_tokens=262_144,
            size_bytes=13 << 30, value_seconds=999.4, is_pinned=n > 2,
            last_used_at=time.time() - 3599,
        )
        for n, kind in enumerate(kinds, 1)
    ]  # fmt: skip

    printed = listing(*listed)
    lines = printed.splitlines()
    assert len(lines) == 1 + 1 + 2 + 4 + 4  # sum, model, headers, sessions, states: none is folded
    assert max(map(len, map(str.rstrip, lines))) <= 80
    assert "worth 999 s" in printed and "pinned" in printed


def test_proxy_may_open_as_many_files_as_its_user() -> None:
    code = (
        "import resource as r; from proxy.cli.serve import allow_files;"
        "r.setrlimit(r.RLIMIT_NOFILE, (256, 4096)); allow_files();"
        "print(*r.getrlimit(r.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "4096 4096\n"


def test_command_that_the_proxy_names_can_be_pasted_into_any_shell() -> None:
    """zsh would look for a file of the name [::1]:8082."""
    settings = Settings(slot_save_path=".", listen="[::1]:8081", admin="[::1]:8082")
    bound: Any = SimpleNamespace(port=8081, admin_port=8082)
    assert _listeners(settings, bound).endswith(" connect opencode --admin '[::1]:8082'")


def test_commands_start_without_what_only_the_proxy_needs() -> None:
    heavy = "aiohttp", "uvloop", "prometheus_client", "obstore"
    code = f"import sys, proxy.__main__; print(*sys.modules.keys() & {{*{heavy}}})"
    assert subprocess.check_output([sys.executable, "-c", code]) == b"\n"
