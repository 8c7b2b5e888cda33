"""What clients are told of the proxy, and how that comes into their own files and out again."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from proxy.__main__ import main
from proxy.cli.command import RunningProxy
from proxy.cli.connect import (
    NAMES,
    _undo,
    _with_model,
    _write,
    client_of,
    connect,
    merged_text,
    written,
)
from tests.lab.server import REPOSITORY

FACTS = {
    **{"URL": "http://127.0.0.1:8081", "MODEL": "local-model", "KEY": "none"},
    **{"CONTEXT": 65536, "WINDOW": 100_000, "PROMPT": 57344, "OUTPUT": 8192},
}


def content(name: str) -> dict[str, Any]:
    return dict(client_of(name, FACTS)["content"])


@pytest.mark.parametrize("name", NAMES)
def test_every_client_is_complete_and_nothing_is_left_open(name: str) -> None:
    client = client_of(name, FACTS)
    text = written(Path(client.get("file", "variables")), client["content"])
    assert client["api"].startswith("/v1/") and "http://127.0.0.1:8081" in text
    assert "$" not in text.replace("$schema", "")


def test_opencode_is_told_what_the_guide_says() -> None:
    guide = json.loads((REPOSITORY / "deploy" / "opencode.json").read_text())
    assert content("opencode") == guide


def test_codex_is_told_what_the_guide_says() -> None:
    told = tomllib.loads(written(Path("config.toml"), content("codex")))
    assert told["model_providers"]["llama-server"]["base_url"] == "http://127.0.0.1:8081/v1"
    assert told["model_context_window"] == 65536


def test_first_prompt_fits_in_what_kimi_does_not_keep_free() -> None:
    """Of 65,536 tokens its default keeps 50,000 free: its first prompt of 29,500 begins a compaction."""
    told = tomllib.loads(written(Path("config.toml"), content("kimi")))
    kept_free = told["loop_control"]["reserved_context_size"]
    assert told["models"]["llamacpp"]["max_context_size"] - kept_free > 29_500


def test_model_name_with_quotes_stays_one_name() -> None:
    facts = {**FACTS, "MODEL": 'my "own": {model}'}
    assert client_of("crush", facts)["content"]["providers"]["llamacpp"]["models"][0]["id"] == (
        'my "own": {model}'
    )
    assert 'key"' in client_of("openai-sdk", {**FACTS, "KEY": 'key"'})["content"].values()


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("llama 🦙", "llama 🦙"),
        ("👨\u200d👩\u200d👧 名\u3000前", "👨\u200d👩\u200d👧 名\u3000前"),
        ("a\nMODEL=b", "a�MODEL=b"),
        ("\x1b[31m\x9b\u202e", "�[31m��"),
    ],
)
def test_model_name_of_any_characters_stays_one_name(name: str, shown: str) -> None:
    def told(client: str, suffix: str) -> str:
        return written(Path(suffix), client_of(client, {**FACTS, "MODEL": name})["content"])

    assert json.loads(told("opencode", "a.json"))["model"] == f"llamacpp/{name}"
    assert tomllib.loads(told("codex", "a.toml"))["model"] == name
    (line,) = (line for line in told("copilot", ".env").splitlines() if "MODEL=" in line)
    assert line == f"COPILOT_MODEL={shown}"


@pytest.mark.parametrize(
    ("name", "file", "before"),
    [
        ("opencode", "a.json", '{"theme": "dark", "provider": {"other": {"npm": "x"}}}'),
        ("opencode", "a.jsonc", '{"theme": "dark", "provider": {"other": {"npm": "x"}}}'),
        ("claude-code", "a.json", '{"env": {"EDITOR": "vi"}, "permissions": {"allow": ["a"]}}'),
        ("continue", "a.yaml", "rules: [Grüße]\nmodels:\n- name: mine\n- name: llama-server\n"),
        ("codex", "a.toml", "approval_policy = 'never'\n[model_providers.mine]\nname = 'm'\n"),
        ("opencode", "a.json", ""),
        ("codex", "a.toml", ""),
    ],
)
def test_own_settings_stay_and_a_second_merge_changes_nothing(
    name: str, file: str, before: str
) -> None:
    path = Path(file)
    after = merged_text(path, before, content(name))
    assert merged_text(path, after, content(name)) == after
    readers: dict[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".yaml": yaml.safe_load}
    read = readers.get(path.suffix, json.loads)
    for word in ("dark", "vi", "allow", "mine", "never", "Grüße"):
        assert (word in before) <= (word in after and word in str(read(after)))
    if path.suffix == ".yaml":
        assert [model["name"] for model in read(after)["models"]] == ["mine", "llama-server"]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no second file system")
def test_link_to_a_file_on_another_file_system_stays_a_link(tmp_path: Path) -> None:
    path = tmp_path / "opencode.json"
    with TemporaryDirectory(dir="/dev/shm") as elsewhere:
        path.symlink_to(Path(elsewhere, "mine.json"))
        with connect.make_context("connect", ["opencode", "--yes"]):
            _write(path, content("opencode"))
            assert path.is_symlink() and "llamacpp" in Path(elsewhere, "mine.json").read_text()
            _undo(path)
        assert list(Path(elsewhere).iterdir()) == list(tmp_path.glob(".*")) == []


def test_settings_are_written_in_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    path = tmp_path / "opencode.json"
    path.write_text('{"theme": "grün"}', encoding="utf-8")
    command = f"""
from pathlib import Path
from proxy.cli.connect import _write, connect
with connect.make_context("connect", ["opencode", "--yes"]):
    _write(Path({str(path)!r}), {{"model": "a"}})
"""
    env = {**os.environ, "PYTHONUTF8": "0", "LC_ALL": "C"}
    subprocess.run([sys.executable, "-c", command], env=env, check=True)
    assert json.loads(path.read_text(encoding="utf-8")) == {"theme": "grün", "model": "a"}


def test_byte_order_mark_does_not_keep_a_file_from_being_merged(tmp_path: Path) -> None:
    path = tmp_path / "opencode.json"
    path.write_text('{"theme": "dark"}', encoding="utf-8-sig")
    with connect.make_context("connect", ["opencode", "--yes"]):
        _write(path, {"model": "a"})
    assert json.loads(path.read_text(encoding="utf-8")) == {"theme": "dark", "model": "a"}


def test_line_that_was_put_above_ours_stays() -> None:
    path, added = Path("config.toml"), 'approval_policy = "never"\n'
    first = merged_text(path, "[tui]\ntheme = 'dark'\n", content("codex"))
    again = merged_text(path, added + first, {**content("codex"), "model": "another"})
    assert again.endswith(added + "[tui]\ntheme = 'dark'\n")
    assert tomllib.loads(again)["approval_policy"] == "never" and again.count("model =") == 1


@pytest.mark.parametrize(
    ("name", "file", "before"),
    [
        ("opencode", "a.json", "// a comment\n{}"),
        ("opencode", "a.jsonc", "/* a comment */ {}"),
        ("opencode", "a.json", "[1]"),
        ("codex", "a.toml", "model = 'mine'\n"),
        ("continue", "a.yaml", "name: Mine  # a comment\nmodels: []\n"),
        ("continue", "a.yaml", "models: ["),
        ("continue", "a.yaml", "name: Gr\xfc\xdfe"),  # in Latin-1
    ],
)
def test_file_that_cannot_be_merged_is_left_alone(
    tmp_path: Path, name: str, file: str, before: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / file
    path.write_text(before, encoding="latin-1")
    with pytest.raises(SystemExit):
        _write(path, content(name))
    assert path.read_text(encoding="latin-1") == before and list(tmp_path.iterdir()) == [path]
    said = capsys.readouterr().err
    assert "by hand" in said and ("sets some of this" in said) is (path.suffix == ".toml")


@pytest.mark.parametrize("before", ["", '{"theme": "dark"}\n'])
def test_what_was_there_comes_back(
    tmp_path: Path, before: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "folder" / "opencode.json"
    if before:
        path.parent.mkdir()
        path.write_text(before)
        path.chmod(0o640)
    with (
        connect.make_context("connect", ["opencode"]),
        pytest.raises(SystemExit),
    ):  # nobody can be asked here
        _write(path, content("opencode"))
    assert not path.exists() or path.read_text() == before
    with connect.make_context("connect", ["opencode", "--yes"]):
        _write(path, content("opencode"))
        assert "llamacpp/local-model" in path.read_text() and "+++" in capsys.readouterr().err
        assert path.stat().st_mode & 0o777 == (0o640 if before else 0o600)
        _write(path, {"model": "another"})
        _undo(path)
        assert f"{path} is as it was" in capsys.readouterr().err
        assert (path.read_text() if path.exists() else "") == before
        assert list(path.parent.iterdir()) == ([path] if before else [])
        with pytest.raises(SystemExit):
            _undo(path)


@pytest.mark.parametrize("since", [None, b"\xe9"])  # in Latin-1
@pytest.mark.parametrize("before", [b"", b'{"theme": "dark"}\r\n'])
def test_what_was_there_comes_back_whatever_became_of_the_file(
    tmp_path: Path, before: bytes, since: bytes | None
) -> None:
    path = tmp_path / "opencode.json"
    path.write_bytes(before)
    with connect.make_context("connect", ["opencode", "--yes"]):
        _write(path, content("opencode"))
        path.unlink() if since is None else path.write_bytes(since)
        _undo(path)
    assert (path.read_bytes() if path.exists() else b"") == before
    assert list(tmp_path.iterdir()) == ([path] if before else [])


@pytest.mark.parametrize(
    ("running", "model", "is_loaded"),
    [
        ("127.0.0.1:8080", "coder", False),
        ("other", "coder", True),
        ("coder", "coder", False),
        ("coder", "codre", True),  # the host may know the name all the same, or refuses it
    ],
)
def test_only_a_model_that_a_host_does_not_run_is_loaded(
    monkeypatch: pytest.MonkeyPatch, running: str, model: str, is_loaded: bool
) -> None:
    asked = list[str]()

    def ask(_: RunningProxy, method: str, *__: object, **___: object) -> dict[str, Any]:
        asked.append(method)
        return {"data": [{"id": "coder"}, {"id": "other"}]}

    monkeypatch.setattr(RunningProxy, "ask", ask)
    proxy, overview = RunningProxy("127.0.0.1:1"), {"servers": [{"name": running}]}
    _with_model(proxy, proxy, overview, model)
    assert ("POST" in asked) is is_loaded


@pytest.mark.parametrize(("n_ctx", "is_told"), [(8_192, True), (65_536, False)])
def test_slot_that_is_too_small_for_an_agent_is_told(
    monkeypatch: pytest.MonkeyPatch, n_ctx: int, is_told: bool
) -> None:
    told = {
        "state": "caching",
        "servers": [{"n_ctx": n_ctx}],
        "listen": "127.0.0.1:8081",
        "reasons": [],
    }
    monkeypatch.setattr(RunningProxy, "overview", lambda _: told)
    chosen = {"id": "local-model"}, told["servers"]
    monkeypatch.setattr(RunningProxy, "model_that_runs", lambda *_: chosen)
    result = CliRunner().invoke(main, ["connect", "opencode"])
    assert result.exit_code == 0, result.output
    assert ("A slot has 8,192 tokens, too few" in result.stderr) is is_told
    assert json.loads(result.stdout)["model"] == "llamacpp/local-model", (
        "it can be sent into a file"
    )
