"""What people are told of their mistakes: plain words, no exception, no errno, no library's own."""

import errno
import os
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from click.testing import CliRunner

from proxy.__main__ import main
from proxy.errors import UpstreamRefused, in_words
from proxy.llama.client import error_message
from proxy.run.process import free_port
from proxy.settings import ENVIRONMENT_PREFIX
from tests.lab.server import REPOSITORY

NOT_PLAIN = re.compile(
    r"Traceback|Errno|Error\b|Exception|<class|object at 0x|NoneType|msgspec|Expected `|mdb_|lmdb|"
    r"ssl:|Connect call|error while attempting|\[SSL|Invalid JSON|Object missing|regex|\.part\b|^\w+\(|"
    r"while parsing|could not find expected|codec can't|Unknown error|repr\(|\bNone\b|\{\}|\[\]"
)
SETTINGS = [  # lines of a settings file, each with what must be told of it
    ("max_requests: 256", "max_requests is no setting: `llama-prefix-cache serve --help` lists"),
    ("min_free_bytes: 2GiB", "lists them, CHANGELOG.md those that are gone"),
    ("drain_seconds: many", "number, at least 0"),
    ("drain_seconds: true", "number"),
    ("drain_seconds: [1, 2]", "number"),
    ("drain_seconds: {a: 1}", "number"),
    ("drain_seconds:", "number"),
    ("idle_save_seconds: 0", "number, more than 0"),
    ("idle_save_seconds: soon", "number, more than 0"),
    ("drain_seconds: -1", "number, at least 0"),
    ("upstream_wait_seconds: 1 min", "number, at least 0"),
    ("log_level: loud", "`debug` or `error`"),
    ("log_level: 3", "`debug` or `error`"),
    ("log_format: xml", "`console` or `json`"),
    ("explain_keep: all", "`none` or `text` or `tokens`"),
    ("context_overflow: cut", "`pass` or `stable`"),
    ("upstream: localhost:8080", "http:// or https:// URL"),
    ("upstream: ftp://localhost", "http:// or https:// URL"),
    ("upstream: 8080", "http:// or https:// URL"),
    ("upstream: []", "http:// or https:// URL"),
    ("listen: '8081'", "HOST:PORT"),
    ("listen: 8081", "HOST:PORT"),
    ("listen: ::1:8081", "HOST:PORT"),
    ("admin: 127.0.0.1:70000", "HOST:PORT"),
    ("admin: https://127.0.0.1:8082", "HOST:PORT"),
    ("admin_open: everything", "`health`, `metrics` or both"),
    ("admin_token_file: [a, b]", "admin_token_file"),
    ("admin_token_file: /no/such/file", "no such file"),
    ("admin_token_file: /etc/passwd", "/etc/passwd must hold the token, and nothing else"),
    ("max_store_bytes: 100", "at least 1MiB"),
    ("max_store_bytes: 10k", "`10k` is not allowed, at `max_store_bytes`"),
    ("max_store_bytes: 20 apples", "a size such as 5GiB"),
    ("max_store_bytes: -1GiB", "a size such as 5GiB"),
    ("max_write_bytes_per_day: lots", "a size such as 5GiB"),
    ("slot_save_path: ''", "slot_save_path"),
    ("slot_save_path: 7", "slot_save_path"),
    ("slot_save_path: /no/such/directory", "is not a directory; create it first"),
    ("slot_save_path: /etc/hostname", "is not a directory; give one"),
    ("share_between_api_keys: perhaps", "true or false or null"),
    ("upstream_api_key: 12345", "a value without quotes is not allowed, at `upstream_api_key`"),
    ("stabilizers: sfae", "sfae is no stabilizer, perhaps safe: docs/stabilizers.md"),
    ("stabilizers: [safe, -stick_date]", "stick_date is no stabilizer, perhaps sticky_date or "),
    ("stabilizers: {safe: true}", "stabilizers"),
    ("aliases: a", "name = name of llama-server"),
    ("aliases: a=b=c", "name = name of llama-server"),
    ("max_stroe_bytes: 1GiB", "perhaps max_store_bytes or max_write_bytes_per_day: `llama-"),
    ("nonsense: 1", "nonsense is no setting: `llama-prefix-cache serve --help` lists them"),
    ("8081: listen", "expected `name: value` lines"),
    ("- a", "expected `name: value` lines"),
    ("a: [", ", line "),
    (
        "log_level: info\nlisten:127.0.0.1:1",
        "line 2: expected `name: value` lines, in UTF-8, without",
    ),
    ("\tlisten: 127.0.0.1:1", "line 1: expected `name: value` lines, in UTF-8, without tabs"),
    ("\xff\xfe", "expected `name: value` lines"),
]


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name.startswith((ENVIRONMENT_PREFIX, "LLAMA_ARG_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def told(*arguments: object, environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Return the exit status of a command and what it said, which must be plain."""
    runner = CliRunner(env=environment)
    result = runner.invoke(main, [str(argument) for argument in arguments])
    said = result.stderr + result.stdout
    assert result.exception is None or isinstance(result.exception, SystemExit), said
    plain = said.replace("Error: ", "")  # how click begins what it says of flags
    assert not NOT_PLAIN.search(plain), said
    assert result.exit_code and len(said.splitlines()) <= 8, said
    return result.exit_code, said


def test_ctrl_c_while_the_modules_load_leaves_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "proxy", "--version"]
    ended = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, b"", b"")


def test_ctrl_c_before_run_listens_is_told_in_words(tmp_path: Path) -> None:
    program = llama_server_in(tmp_path, "kill -INT $PPID")
    assert told("run", "--", program) == (130, "llama-prefix-cache: interrupted\n")


@pytest.mark.parametrize(("line", "words"), SETTINGS)
def test_wrong_line_of_a_settings_file_is_told_in_words(
    tmp_path: Path, line: str, words: str
) -> None:
    (tmp_path / "slots").mkdir()
    file = tmp_path / "settings.yaml"
    there = "" if line.startswith("slot_save_path") else f"slot_save_path: {tmp_path}/slots\n"
    file.write_bytes((line + "\n" + there).encode("latin-1"))
    status, said = told("serve", "--config", file)
    assert status == 2 and words in said
    if "key" in line and "12345" in line:
        assert "12345" not in said  # a key is never repeated


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("serve",), "slot_save_path is missing"),
        (("serve", "--slot-save-path", ".", "--listen", "x"), "HOST:PORT"),
        (("serve", "--slot-save-path", ".", "--max-store-bytes", "12"), "at `max_store_bytes`"),
        (("serve", "--nonsense"), "No such option"),
        (("srve",), "No such command"),
        (("serve", "--config", "/no/such/file.yaml"), "does not exist"),
        (("run",), "Missing argument"),
        (
            ("run", "--", "/no/such/program"),
            "not found, or no program. Give llama-server's path: llama-prefix-cache run",
        ),
        (("run", "-m", "model.gguf"), "run [OPTIONS] -- COMMAND"),
        (("export", "5d3a90c2", "-o", "-"), "not to the standard output: name a file"),
        (("bench", "--report", "THERE"), "is there already. Replace it? Nothing was done: --yes"),
        (("bench", "--report", "/no/such/report.json"), "/no/such does not exist"),
        (("run", "--", "/etc/hostname"), "cannot be run"),
        (("run", "--", "-m", "model.gguf"), ": no program stands behind `--`. Give"),
        (("run", "--", "/bin/true"), "this is not llama-server"),
        (("ls",), "no proxy answers at http://127.0.0.1:1"),
        (
            ("stats",),
            "connection refused. Start it (`run` or `serve`), or give --admin HOST:PORT if",
        ),
        (("explain",), "no proxy answers"),
        (("rm", "1b70"), "`unpin` and `rm` take --slot-save-path DIRECTORY"),
        (("warm", "--from-request", "last"), "no proxy answers"),
        (("stats", "--admin", "http://no.such.host.invalid:8082"), "no proxy answers"),
        (("stats", "--admin", "nonsense"), "HOST:PORT"),
        (("stats", "--admin-token-file", "/no/such/token"), "no such file"),
        (("warm",), "give either FILE or --from-request"),
        (("warm", "/no/such/body.json"), "No such file"),
        (("ls", "--slot-save-path", "/no/such/directory"), "there is no store in"),
        (("ls", "--slot-save-path", ".", "--admin", "http://127.0.0.1:1"), "give one"),
        (("check",), "slot_save_path is missing"),
        (("check", "--slot-save-path", "EMPTY"), "there is no store in"),
        (("rm", "--everything", "--slot-save-path", "EMPTY"), "there is no store in"),
        (("rm",), "give IDs and/or --unused-for, or --everything"),
        (("rm", "--unused-for", "long"), "write such as 30m"),
        (("export", "0000", "--slot-save-path", "EMPTY"), "Missing option"),
        (("export", "0000", "-o", "x.lpc", "--slot-save-path", "EMPTY"), "there is no state in"),
        (("import", "/no/such/file.lpc"), "does not exist"),
        (("import", "/etc/hostname", "--slot-save-path", "EMPTY"), "not what `export` writes"),
        (("doctor",), "slot_save_path is missing"),
        (("pin",), "Missing argument"),
    ],
)
def test_wrong_command_is_told_in_words(
    tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "THERE").touch()
    given = [str(tmp_path / each) if each in ("EMPTY", "THERE") else each for each in arguments]
    nobody = {ENVIRONMENT_PREFIX + "ADMIN": "127.0.0.1:1"}
    status, said = told(*given, environment=nobody)
    assert words in said and (status == 2 or arguments[0] != "run")


@pytest.mark.parametrize("name", ["MAX_REQUEST", "ADMIN_TOKEN", "PORT"])
def test_unknown_variable_is_told_in_words(name: str) -> None:
    _, said = told("stats", environment={ENVIRONMENT_PREFIX + name: "3"})
    assert f"{ENVIRONMENT_PREFIX}{name} is no setting" in said


LLAMA_SERVERS_404 = b'{"error": {"code": 404, "message": "File Not Found"}}'


@pytest.mark.parametrize("page", [b"", b"<!DOCTYPE HTML><p>nginx", LLAMA_SERVERS_404])
@pytest.mark.parametrize("arguments", [("stats",), ("warm", "/etc/hostname"), ("explain",)])
def test_address_of_something_else_is_told_in_words(page: bytes, arguments: tuple[str]) -> None:
    head = b"HTTP/1.1 404 Not Found\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)

        def answer() -> None:
            asked, _ = listener.accept()
            with asked:
                asked.recv(1 << 16)
                asked.sendall(head % len(page) + page)
                while asked.recv(1 << 16):
                    pass

        answering = Thread(target=answer)
        answering.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"  # perhaps the one for clients
        clients = {ENVIRONMENT_PREFIX + "LISTEN": address}
        status, said = told(*arguments, "--admin", address, environment=clients)
        answering.join()
    assert status == 69 and said.endswith(" is not the admin listener of llama-prefix-cache\n")


@pytest.mark.parametrize("page", ["", "<html><p>nginx", "plain words"])
def test_refusal_without_words_ends_at_its_status(page: str) -> None:
    said = str(UpstreamRefused(404, error_message(page.encode())))
    assert said == "llama-server answered 404" + (": plain words" if "plain" in page else "")


def test_refusal_of_many_words_is_shortened() -> None:
    """/health and the log tell it."""
    body = b'{"error": {"message": "%b"}}' % (b"x" * (1 << 20))
    assert error_message(body) == "x" * 1000


@pytest.fixture
def taken() -> Iterator[str]:
    """A port that somebody listens on, this process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("flag", ["--listen", "--admin"])
def test_port_that_is_taken_is_told_with_its_flag(tmp_path: Path, taken: str, flag: str) -> None:
    free = {"--listen": "127.0.0.1:0", "--admin": "127.0.0.1:0"} | {flag: taken}
    flags = [part for pair in free.items() for part in pair]
    status, said = told("serve", "--slot-save-path", tmp_path, *flags)
    assert status == 69
    assert f"cannot listen on {taken}: address already in use: give another {flag}" in said


@pytest.mark.parametrize("words", [("-fa",), ("-c", "9", "-m"), ("-fa", "on", "--flash_attn")])
def test_flag_without_its_value_is_told_before_another_is_added(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    """`-fa` had none until August 2025, and `-m $MODEL` has none without that variable."""
    flags = ("-m, --model FNAME   a", "-fa, --flash-attn [on|off|auto]   b", "-c, --ctx-size N   c")
    listed = "\n".join((*flags, "--slot-save-path PATH   d"))
    program = llama_server_in(tmp_path, f"echo '{listed}'")
    status, said = told("run", "--", program, *words)
    assert status == 2 and said.endswith(f"\n  {words[-1]} needs a value\n")


def test_port_that_is_taken_is_told_before_llama_server_is_started(
    tmp_path: Path, taken: str
) -> None:
    program = llama_server_in(tmp_path)
    flags = ("--slot-save-path", tmp_path, "--listen", taken, "--admin", "127.0.0.1:0")
    status, said = told("run", *flags, "--", program)
    assert status == 69 and said.startswith(f"llama-prefix-cache: cannot listen on {taken}")


def test_run_on_a_kernel_without_ipv6_is_told_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class WithoutIPv6(socket.socket):
        def __init__(self, family: int = -1, *rest: Any, **more: Any) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
            super().__init__(family, *rest, **more)

    monkeypatch.setattr(socket, "socket", WithoutIPv6)
    with pytest.raises(OSError, match="address family not supported"):
        free_port("::1", 8080)


def test_address_of_another_machine_is_told_in_words(tmp_path: Path) -> None:
    flags = ("--listen", "192.0.2.1:8081", "--admin", "127.0.0.1:0")
    status, said = told("serve", "--slot-save-path", tmp_path, *flags)
    assert status == 69 and "192.0.2.1:8081: cannot assign requested address" in said


def llama_server_in(folder: Path, script: str = "echo '--slot-save-path PATH   where'") -> Path:
    """Return a program that `run` takes for llama-server."""
    program = folder / "llama-server"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


def test_folder_that_cannot_be_written_is_told_in_words(tmp_path: Path) -> None:
    program = llama_server_in(tmp_path)
    _, said = told("run", "--slot-save-path", "/etc/hostname/slots", "--", program)
    assert "/etc/hostname/slots: not a directory" in said
    program.chmod(stat.S_IRUSR)
    assert "command not found" in told("run", "--", program)[1]


def test_commands_are_told_in_whole_sentences() -> None:
    said = CliRunner().invoke(main, ["--help"]).output
    assert "..." not in said.partition("Commands:")[2]


def test_defaults_in_help_are_sizes_that_people_read() -> None:
    said = CliRunner().invoke(main, ["serve", "--help"]).output
    assert "20GiB" in said and "21474836480" not in said


def test_permission_that_is_denied_is_told_with_who_has_none() -> None:
    said = in_words(PermissionError(errno.EACCES, "Permission denied", "/srv/slots"))
    assert said == f"/srv/slots: permission denied for this user (uid {os.geteuid()})"
