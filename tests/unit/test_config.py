"""Settings: where their values come from, and which are refused."""

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from proxy import app
from proxy.app import admin_token
from proxy.core.sharing import SharedLimits
from proxy.errors import SettingsError
from proxy.settings import (
    ENVIRONMENT_PREFIX,
    NAMES,
    Settings,
    complete_settings,
    merge_settings,
    parse_pairs,
    parse_shared_store,
    split_address,
    token_to_show,
)
from tests.lab.settings import load_settings


def load(
    folder: Path,
    flags: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    file: str | bytes | None = None,
) -> Settings:
    """Load settings from the given sources; `file` is the content of a YAML file."""
    path = folder / "config.yaml" if file is not None else None
    if path and file is not None:
        path.write_bytes(file.encode() if isinstance(file, str) else file)
    named = {ENVIRONMENT_PREFIX + key: value for key, value in (environment or {}).items()}
    return load_settings({"slot_save_path": str(folder), **(flags or {})}, named, path)


def refusal(folder: Path, **sources: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        load(folder, **sources)
    return str(caught.value)


def test_settings_without_sources_are_the_defaults(tmp_path: Path) -> None:
    assert load(tmp_path) == Settings(slot_save_path=str(tmp_path))


def test_settings_from_file_environment_and_flags_beat_each_other_in_order(tmp_path: Path) -> None:
    file = "ahead_seconds: 1\nlog_level: debug\ndrain_seconds: 7\nlisten: 0.0.0.0:9000\n"
    environment = {"AHEAD_SECONDS": "2", "LOG_LEVEL": "error", "DRAIN_SECONDS": "8"}
    settings = load(tmp_path, {"ahead_seconds": 3, "log_level": None}, environment, file)
    assert settings.ahead_seconds == 3
    assert settings.log_level == "error"
    assert settings.drain_seconds == 8.0
    assert settings.listen == "0.0.0.0:9000"
    assert settings.admin == Settings(slot_save_path=".").admin


def test_settings_from_an_empty_file_are_the_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, file="# nothing yet\n") == load(tmp_path)


def test_one_address_for_clients_and_operators_is_refused(tmp_path: Path) -> None:
    assert "listen and admin are both :9" in refusal(
        tmp_path, flags={"listen": ":9", "admin": ":9"}
    )
    assert load(tmp_path, {"listen": ":0", "admin": ":0"}).admin == ":0"


def test_directory_is_told_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(tmp_path, {"slot_save_path": "."}).slot_save_path == str(tmp_path)


def test_line_ends_of_an_environment_file_belong_to_no_value(tmp_path: Path) -> None:
    environment = {"UPSTREAM_API_KEY": "secret\n", "LISTEN": "[::1]:1\r", "LOG_LEVEL": "debug\r\n"}
    settings = load(tmp_path, environment=environment)
    assert settings.upstream_api_key == "secret" and settings.listen == "[::1]:1"
    assert settings.log_level == "debug"


def test_setting_from_the_environment_is_converted(tmp_path: Path) -> None:
    environment = {"SHARE_BETWEEN_API_KEYS": "true", "IDLE_SAVE_SECONDS": "2.5"}
    settings = load(tmp_path, environment=environment)
    assert (settings.share_between_api_keys, settings.idle_save_seconds) == (True, 2.5)


def test_variables_that_kubernetes_sets_for_services_are_no_settings(tmp_path: Path) -> None:
    environment = {
        "SERVICE_HOST": "10.0.0.1",
        "SERVICE_PORT_HTTP": "8081",
        "PORT": "tcp://10.0.0.1:8081",
        "PORT_8081_TCP_ADDR": "10.0.0.1",
        "ADMIN_PORT": "tcp://10.0.0.1:8082",
    }
    assert load(tmp_path, environment=environment) == load(tmp_path)
    assert "PORT is no setting" in refusal(tmp_path, environment={"PORT": "8081"})


@pytest.mark.parametrize(
    ("written", "n_bytes"),
    [
        ("20GiB", 20 << 30),
        ("1.5 MiB", 3 << 19),
        (" 2TiB ", 2 << 40),
        ("1024KiB", 1 << 20),
        ("20GB", 20_000_000_000),
        ("1500 kb", 1_500_000),
        ("2g", 2 << 30),
        ("2000000", 2_000_000),
    ],
)
def test_size_with_a_unit_is_read_in_every_source(
    tmp_path: Path, written: str, n_bytes: int
) -> None:
    from_file = load(tmp_path, file=f"max_store_bytes: '{written}'")
    from_environment = load(tmp_path, environment={"MAX_STORE_BYTES": written})
    from_flag = load(tmp_path, {"max_store_bytes": written})
    for settings in (from_file, from_environment, from_flag):
        assert settings.max_store_bytes == n_bytes


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("stabilizers: [safe, sticky_date]", "stabilizers", "safe, sticky_date"),
        ("upstream: [http://a:1, http://b:2]", "upstream", "http://a:1, http://b:2"),
        ("aliases: {opus: qwen, haiku: qwen}", "aliases", "opus = qwen, haiku = qwen"),
        ("aliases: [opus = qwen]", "aliases", "opus = qwen"),
        ("admin_open: [health, metrics]", "admin_open", "health, metrics"),
    ],
)
def test_list_in_the_file_is_what_commas_are(
    tmp_path: Path, line: str, name: str, value: str
) -> None:
    assert getattr(load(tmp_path, file=line), name) == value


def test_token_that_a_full_disk_left_empty_is_made_anew(tmp_path: Path) -> None:
    kept = tmp_path / "admin-token"
    kept.touch()
    settings = Settings(slot_save_path=str(tmp_path), admin="0.0.0.0:8082")
    token = admin_token(settings)
    assert token and kept.read_text().strip() == token
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert admin_token(settings) == token


def test_token_that_cannot_be_written_is_not_said_to_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(app, "write_whole", refuse)
    with capture_logs() as logs:
        assert admin_token(Settings(slot_save_path=str(tmp_path), admin="0.0.0.0:8082"))
    assert [line["kept_in"] for line in logs] == [""] and "kept in" not in logs[0]["says"]


@pytest.mark.parametrize(
    "address", ["my_host.lan:80", "[::1]:8081", "0.0.0.0:1", ":8081", "a.:65535", "büro:80"]
)
def test_address_of_any_host_is_allowed(tmp_path: Path, address: str) -> None:
    assert load(tmp_path, {"listen": address}).listen == address
    if not address.startswith(":"):
        for url in (f"http://{address}", f"https://{address}/a/b", f"http://{address}/, http://c"):
            assert load(tmp_path, {"upstream": url}).upstream == url


def test_directory_that_nobody_asks_for_need_not_be_readable(tmp_path: Path) -> None:
    """Commands that ask a running proxy: its directory is mostly its own user's alone."""
    hidden = str(tmp_path / ("x" * 300))  # no system call takes such a name
    with pytest.raises(SettingsError, match="slot_save_path"):
        complete_settings({"slot_save_path": hidden})
    settings = complete_settings({"slot_save_path": hidden}, needs_directory=False)
    assert token_to_show(settings) is None
    given = complete_settings({"slot_save_path": ".", "admin_token_file": hidden})
    with pytest.raises(SettingsError, match="admin_token_file"):
        token_to_show(given)


def test_size_per_day_is_read_with_a_unit_too(tmp_path: Path) -> None:
    assert load(tmp_path, {"max_write_bytes_per_day": "50GiB"}).max_write_bytes_per_day == 50 << 30
    assert load(tmp_path).max_write_bytes_per_day == 0


@pytest.mark.parametrize(
    "written", ["GiB", "much", "-1GiB", "0", "1KiB", "nanGiB", "infGiB", "1e999GiB", ""]
)
def test_size_that_is_none_is_refused(tmp_path: Path, written: str) -> None:
    message = refusal(tmp_path, environment={"MAX_STORE_BYTES": written})
    assert message.startswith("environment: ") and "max_store_bytes" in message


def test_unknown_key_in_the_file_is_refused_with_its_source_and_the_nearest_names(
    tmp_path: Path,
) -> None:
    message = refusal(tmp_path, file="max_byte: 1GiB\n")
    assert message.startswith(str(tmp_path / "config.yaml"))
    assert "max_byte is no setting, perhaps max_store_bytes: " in message
    assert (
        sum(name in message for name in NAMES) <= 2
        and "`llama-prefix-cache serve --help`" in message
    )


def test_all_unknown_settings_are_named_at_once(tmp_path: Path) -> None:
    """A file of an earlier version has several."""
    told = refusal(tmp_path, file="max_requests: 9\nnonsense: 1\n")
    assert "max_requests is no setting; nonsense is no setting: `llama-prefix-cache " in told
    told = refusal(tmp_path, environment={"MAX_REQUESTS": "9", "NONSENSE": "1"})
    assert "LLAMA_PREFIX_CACHE_MAX_REQUESTS is no setting" in told
    assert "; LLAMA_PREFIX_CACHE_NONSENSE is no setting" in told


def test_unknown_variable_with_our_prefix_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, environment={"DRAIN_SECOND": "3"})
    assert "environment: LLAMA_PREFIX_CACHE_DRAIN_SECOND is no setting" in message
    assert "perhaps LLAMA_PREFIX_CACHE_DRAIN_SECONDS" in message


def test_variable_that_names_the_file_is_allowed(tmp_path: Path) -> None:
    assert load(tmp_path, environment={"CONFIG": "/etc/x.yaml"}) == load(tmp_path)


def test_variables_of_others_are_ignored(tmp_path: Path) -> None:
    environment = {"HOME": "/root", "LLAMA_ARG_PORT": "1"}
    assert load_settings({"slot_save_path": str(tmp_path)}, environment, None) == load(tmp_path)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("drain_seconds: many", "drain_seconds"),
        ("drain_seconds: '3 s'", "drain_seconds"),
        ("drain_seconds: true", "drain_seconds"),
        ("drain_seconds:", "drain_seconds"),
        ("max_store_bytes: 1.5", "max_store_bytes"),
        ("max_store_bytes: true", "max_store_bytes"),
        ("max_store_bytes: 0", "max_store_bytes"),
        ("max_store_bytes:", "max_store_bytes"),
        ("idle_save_seconds: 0", "idle_save_seconds"),
        ("idle_save_seconds: .nan", "idle_save_seconds"),
        ("drain_seconds: -1", "drain_seconds"),
        ("drain_seconds: .inf", "at most 604800"),
        ("upstream_wait_seconds: .inf", "at most 604800"),
        ("log_level: loud", "log_level"),
        ("upstream: localhost:8080", "upstream"),
        ("upstream: ftp://localhost", "upstream"),
        ("upstream: http://", "upstream"),
        ("upstream: http://127.0.0.1:99999", "upstream"),
        ("upstream: 'http://[::1'", "upstream"),
        ("upstream: http://a..b:80", "upstream"),
        ("upstream: http://user:word@localhost:80", "upstream"),  # clients have keys of their own
        ("listen: a..b:8081", "listen"),
        ("listen: '8081'", "listen"),
        ("listen: ::1:8081", "listen"),
        ("listen: 127.0.0.1:70000", "listen"),
        ("max_store_bytes: 100", "max_store_bytes"),
        ("slot_save_path: ''", "slot_save_path"),
        ("share_between_api_keys: 2", "share_between_api_keys"),
        ("aliases: a", "aliases"),
        ("aliases: a=b=c", "aliases"),
        ("aliases: a=b c=d", "aliases"),
        ("aliases: a=", "aliases"),
        ("aliases: {a: null}", "aliases"),
        ("aliases: {a: yes}", "aliases"),
        ("aliases: {a: [b]}", "aliases"),
        ("shared_store: {url: 's3://a/b', key_file: ''}", "shared_store"),  # would not be sealed
        ("shared_store: {url: 's3://a/b', key_file: ' '}", "shared_store"),
        ("shared_store: {url: 's3://a/b', key_file: null}", "shared_store"),
        ("shared_store: {url: 's3://a/b', capacity: much}", "shared_store"),
        ("shared_store: {url: 's3://a/b', capacity: -5}", "shared_store"),
        ("shared_store: {url: 's3://a/b', upload_bytes_per_day: 1.2.3GiB}", "shared_store"),
        ("shared_store: {capacity: 5GiB}", "shared_store"),
        ("shared_store: file://mnt/nas", "shared_store"),  # below the working directory
    ],
)
def test_impossible_value_in_the_file_is_refused_by_name(
    tmp_path: Path, line: str, name: str
) -> None:
    message = refusal(tmp_path, file=line)
    assert message.startswith(str(tmp_path / "config.yaml")) and name in message


def test_value_in_quotes_means_the_same_in_the_file_as_in_the_environment(tmp_path: Path) -> None:
    """A refusal would say: `3` is not allowed. Allowed: number."""
    in_file = load(tmp_path, file='drain_seconds: "3"\nshare_between_api_keys: "true"\n')
    told = {"DRAIN_SECONDS": "3", "SHARE_BETWEEN_API_KEYS": "true"}
    assert in_file == load(tmp_path, environment=told)
    assert (in_file.drain_seconds, in_file.share_between_api_keys) == (3.0, True)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_file_that_windows_has_written_is_read(tmp_path: Path, encoding: str) -> None:
    """PowerShell writes UTF-16, and Notepad a mark before UTF-8."""
    written = "stabilizers: none\r\nadmin_token_file: /schlüssel\r\n".encode(encoding)
    settings = load(tmp_path, file=written)
    assert (settings.stabilizers, settings.admin_token_file) == ("none", "/schlüssel")


def test_file_in_an_encoding_of_old_is_refused_and_explained(tmp_path: Path) -> None:
    assert "UTF-8" in refusal(tmp_path, file="admin_token_file: /schlüssel\n".encode("latin-1"))


@pytest.mark.parametrize("value", ["many", "0", "-3", "1.5", ""])
def test_impossible_value_in_the_environment_is_refused_by_name(tmp_path: Path, value: str) -> None:
    message = refusal(tmp_path, environment={"MAX_STORE_BYTES": value})
    assert message.startswith("environment: ") and "max_store_bytes" in message


def test_impossible_flag_is_refused_by_name(tmp_path: Path) -> None:
    message = refusal(tmp_path, flags={"idle_save_seconds": 0})
    assert message.startswith("command line: ") and "idle_save_seconds" in message


def test_directory_whose_name_is_not_in_utf_8_is_refused_by_every_source(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/slots-\xe9")
    Path(path).mkdir()
    assert "Allowed: path in UTF-8" in refusal(tmp_path, flags={"slot_save_path": path})
    with pytest.raises(SettingsError, match="path in UTF-8"):
        complete_settings({"slot_save_path": path})  # `run` knows it from llama-server's flags


def test_impossible_value_is_refused_even_if_a_flag_overrides_it(tmp_path: Path) -> None:
    message = refusal(tmp_path, flags={"idle_save_seconds": 5}, file="idle_save_seconds: 0")
    assert message.startswith(str(tmp_path / "config.yaml"))


@pytest.mark.parametrize(
    "content",
    ["- a\n- b\n", "just text", "a: [", "8081: listen\n", b"\xff\xfe\x00broken"],
    ids=["list", "text", "cut off", "number as a name", "binary"],
)
def test_file_that_is_no_settings_file_is_refused_by_name(
    tmp_path: Path, content: str | bytes
) -> None:
    assert refusal(tmp_path, file=content).startswith(str(tmp_path / "config.yaml"))


def test_setting_that_the_file_has_twice_is_refused_by_name(tmp_path: Path) -> None:
    """YAML takes the last one: an edit of the first would do nothing."""
    message = refusal(tmp_path, file="drain_seconds: 5\nlog_level: info\ndrain_seconds: 30\n")
    assert message.endswith("config.yaml: it sets more than once: drain_seconds")


def test_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="gone.yaml"):
        load_settings({"slot_save_path": str(tmp_path)}, {}, tmp_path / "gone.yaml")


def test_missing_slot_save_path_is_refused_and_explained() -> None:
    with pytest.raises(SettingsError, match="slot_save_path is missing"):
        load_settings({}, {}, None)


def test_slot_save_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, flags={"slot_save_path": str(tmp_path / "gone")})
    assert "gone is not a directory" in message


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [("127.0.0.1:80", "127.0.0.1", 80), ("[::1]:8081", "::1", 8081), (":8081", "", 8081)],
)
def test_split_address_tells_host_and_port(
    tmp_path: Path, address: str, host: str, port: int
) -> None:
    assert load(tmp_path, {"listen": address}).listen == address
    assert split_address(address) == (host, port)


@pytest.mark.parametrize(
    ("written", "aliases"),
    [
        ("", {}),
        ("  ", {}),
        ("a=b", {"a": "b"}),
        (" a = b , c/d:e=f.g ", {"a": "b", "c/d:e": "f.g"}),
    ],
)
def test_aliases_are_read_in_every_source(
    tmp_path: Path, written: str, aliases: dict[str, str]
) -> None:
    for sources in (
        {"file": f"aliases: '{written}'"},
        {"environment": {"ALIASES": written}},
        {"flags": {"aliases": written}},
    ):
        assert parse_pairs(load(tmp_path, **sources).aliases) == aliases


@pytest.mark.parametrize(
    "line",
    [
        "shared_store: {capacity: 1.5 GiB, upload_bytes_per_day: 50GB, url: 's3://a/b', key_file: /k}",
        "shared_store: ' capacity=1.5GiB ,upload_bytes_per_day=50GB , key_file = /k , url=s3://a/b'",
        "shared_store: url=s3://a/b, key_file=/k, capacity=1.5GIB, upload_bytes_per_day=50gb",
    ],
)
def test_shared_store_is_read_with_its_limits(tmp_path: Path, line: str) -> None:
    limits = SharedLimits(upload_bytes_per_day=50_000_000_000, capacity=3 << 29)
    store = load(tmp_path, file=line).shared_store
    assert parse_shared_store(store) == ("s3://a/b", "/k", limits)


@pytest.mark.parametrize("text", ["aliases: 2026-13-45", "listen: " + "[" * 1000])
def test_file_that_yaml_itself_fails_at_is_named(tmp_path: Path, text: str) -> None:
    (file := tmp_path / "config.yaml").write_text(text)
    with pytest.raises(SettingsError, match="expected `name: value` lines"):
        merge_settings({}, {}, file)
