"""What is added to the user's llama-server flags, and what contradicts them."""

from typing import Any

import pytest

from proxy.core.launch import (
    Given,
    Launch,
    keep_slots_apart,
    let_presets_win,
    narrow_batches,
    plan_launch,
    restart_delay_seconds,
)

KNOWN = frozenset(
    "--slot-save-path --port -np --parallel --cache-ram --cache-idle-slots --no-cache-idle-slots "
    "--ctx-checkpoints --metrics --slots --no-slots --kv-unified".split()
)
WANTED: Any = {"default_path": "/cache", "free_port": 50123, "working_directory": "/work"}


def launch(known: Any = KNOWN, *, own: Any = None, **given: Any) -> Launch:
    """Plan a launch; parallel="2" stands for --parallel 2."""
    flags: dict[str, Given] = {}
    for key, value in given.items():
        name = "--" + key.replace("_", "-")
        flags[name] = value if isinstance(value, Given) else Given(name, value)
    return plan_launch(flags, known, own_path=own, **WANTED)


def added(made: Launch) -> str:
    return " ".join(made.added)


def test_plan_launch_of_a_bare_command_adds_everything() -> None:
    made = launch()
    assert added(made) == (
        "--slot-save-path /cache --port 50123 -np 1 --cache-ram 0 --ctx-checkpoints 16 --metrics"
    )
    assert (made.upstream, made.slot_save_path) == ("http://127.0.0.1:50123", "/cache")
    assert (made.n_context_checkpoints, made.has_ram_cache) == (16, False)
    assert (made.conflicts, made.warnings) == ([], [])
    assert made.says == "the models that it finds, 1 slot of the model's whole context"
    assert launch(parallel="-1", ctx_size="8192").says.endswith(", some slots of 8,192 tokens")
    assert made.n_ctx == 0
    assert launch(ctx_size="131072", parallel="2").n_ctx == 65536
    assert launch(ctx_size="64k").n_ctx == 64, "so llama-server reads it"
    assert launch(kv_unified_per_slot="2048", parallel="2").n_ctx == 2048
    assert launch(ctx_size="8192", kv_unified="on", kv_unified_per_slot="2048").n_ctx == 2048
    assert launch(ctx_size="2048", parallel="2", kv_unified_per_slot="2048").n_ctx == 1024


def test_plan_launch_of_an_older_build_adds_only_what_it_knows() -> None:
    made = launch(frozenset(("--slot-save-path", "--port", "-np")))
    assert added(made) == "--slot-save-path /cache --port 50123 -np 1"
    assert made.n_context_checkpoints is None
    (warning,) = launch(ctx_checkpoints="0").warnings
    assert warning.startswith("--ctx-checkpoints 0: ")


def test_plan_launch_keeps_what_the_user_gave() -> None:
    made = launch(
        slot_save_path="/mine", port="9000", parallel="2", cache_ram="0", ctx_checkpoints="16",
        metrics="on", host="0.0.0.0",
    )  # fmt: skip
    assert made.added == []
    assert (made.upstream, made.slot_save_path) == ("http://127.0.0.1:9000", "/mine")
    assert (made.host, made.n_context_checkpoints) == ("0.0.0.0", 16)
    assert made.warnings == []


@pytest.mark.parametrize(
    ("given", "added_then", "n_warnings"),
    [
        ({}, "-b 512", 0),
        ({"ubatch_size": "2048"}, "-b 2048", 0),
        ({"batch_size": "512"}, "", 0),
        ({"batch_size": "2048"}, "", 1),
        ({"batch_size": "2048", "ubatch_size": "2048"}, "", 0),
        ({"batch_size": "256"}, "", 0),  # llama-server makes the physical one as small
    ],
)
def test_narrow_batches_makes_logical_and_physical_batches_alike(
    given: dict[str, str], added_then: str, n_warnings: int
) -> None:
    flags = {f"--{n.replace('_', '-')}": Given(n, value) for n, value in given.items()}
    made = Launch()
    narrow_batches(made, flags, {"-b", "--batch-size"})
    assert (added(made), len(made.warnings)) == (added_then, n_warnings)


@pytest.mark.parametrize(("size", "is_narrow"), [("", False), ("512", True), ("513", False)])
def test_plan_launch_tells_whether_batches_are_narrow_whatever_the_model(
    size: str, is_narrow: bool
) -> None:
    assert launch(**({"batch_size": size} if size else {})).has_narrow_batches == is_narrow


@pytest.mark.parametrize(
    ("given", "added_then", "n_warnings"),
    [
        ({"parallel": "2"}, "--no-repack", 0),
        ({"parallel": "-1"}, "--no-repack", 0),  # llama-server chooses
        ({"parallel": "1"}, "", 0),
        ({}, "", 0),  # one slot is added
        ({"parallel": "2", "repack": "on"}, "", 1),
        ({"parallel": "2", "repack": "off"}, "", 0),
    ],
)
def test_keep_slots_apart_adds_a_flag_for_several_slots(
    given: dict[str, str], added_then: str, n_warnings: int
) -> None:
    flags = {f"--{name}": Given(name, value) for name, value in given.items()}
    made = Launch()
    keep_slots_apart(made, flags, {"--no-repack"})
    assert (added(made), len(made.warnings)) == (added_then, n_warnings)


def test_plan_launch_without_slot_saves_is_a_conflict() -> None:
    assert "--slot-save-path" in launch(KNOWN - {"--slot-save-path"}).conflicts[0]


@pytest.mark.parametrize(
    ("own", "theirs", "expected"),
    [
        ("/own", None, "/own"),
        ("/work/own", "own", "/work/own"),
        ("/own", "/own/", "/own"),
        (None, "../theirs", "/theirs"),
    ],
)
def test_plan_launch_finds_the_one_directory(own: str, theirs: str, expected: str) -> None:
    made = launch(own=own, **({"slot_save_path": theirs} if theirs else {}))
    assert (made.slot_save_path, made.conflicts) == (expected, [])
    assert ("--slot-save-path" in made.added) == (theirs is None)


def test_plan_launch_with_two_directories_names_both() -> None:
    (conflict,) = launch(own="/own", slot_save_path="/theirs").conflicts
    assert "--slot-save-path /theirs" in conflict and "/own" in conflict


def test_plan_launch_names_a_variable_as_the_user_wrote_it() -> None:
    theirs = Given("LLAMA_ARG_SLOT_SAVE_PATH", "/theirs")
    assert (
        "LLAMA_ARG_SLOT_SAVE_PATH=/theirs" in launch(own="/o", slot_save_path=theirs).conflicts[0]
    )


@pytest.mark.parametrize(
    ("given", "upstream"),
    [
        ({"port": "0"}, "http://127.0.0.1:50123"),
        ({"host": "::"}, "http://[::1]:50123"),
        ({"host": "10.0.0.5"}, "http://10.0.0.5:50123"),
        ({"host": "/run/l.sock, 127.0.0.2"}, "http://127.0.0.2:50123"),
        ({"port": "80", "api_prefix": "/llm/"}, "http://127.0.0.1:80/llm"),
    ],
)
def test_plan_launch_follows_llama_server_to_where_it_listens(
    given: dict[str, str], upstream: str
) -> None:
    made = launch(**given)
    assert (made.upstream, made.conflicts) == (upstream, [])


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"host": "/run/llama.sock"}, "--host /run/llama.sock"),
        ({"port": "http"}, "--port http"),
        ({"ssl_cert_file": "c.pem"}, "--ssl-cert-file c.pem"),
    ],
)
def test_plan_launch_names_what_cannot_work(given: dict[str, str], named: str) -> None:
    (conflict,) = launch(**given).conflicts
    assert named in conflict


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"cache_ram": "512"}, "--cache-ram 512"),
        ({"kv_unified": "on"}, "--kv-unified"),
        ({"parallel": "-1"}, "--parallel -1"),
        (
            {"cache_disk": "512", "cache_disk_dir": "/tmp"},
            "--cache-disk 512, --cache-disk-dir /tmp",
        ),
        ({"radix_cache": "on"}, "--radix-cache:"),
    ],
)
def test_plan_launch_warns_of_what_costs(given: dict[str, str], named: str) -> None:
    made = launch(**given)
    (warning,) = made.warnings
    assert named in warning and made.conflicts == []


@pytest.mark.parametrize(
    ("given", "is_told"),
    [
        ({}, True),
        ({"ctx_size": "4096"}, True),
        ({"model": "a.gguf"}, False),
        ({"hf_repo": "a/b"}, False),
        ({"models_dir": "/models"}, False),
        ({"gpt_oss_20b_default": "on"}, False),
    ],
)
def test_plan_launch_without_a_model_says_that_it_is_a_router(
    given: dict[str, str], is_told: bool
) -> None:
    told = launch(KNOWN | {"--models-dir"}, **given).warnings
    assert ["starts as a router" in warning for warning in told] == [True] * is_told
    assert all("unless your script gives one" in warning for warning in told)
    assert launch(**given).warnings == []  # of builds without a router


def test_plan_launch_with_a_ram_cache_keeps_idle_slots_out_of_it() -> None:
    assert "--no-cache-idle-slots" in launch(cache_ram="512").added
    assert "--no-cache-idle-slots" not in launch(cache_ram="0").added
    kept = launch(cache_ram="512", cache_idle_slots="on")  # not shared: copied, but not cleared
    assert kept.conflicts == [] and "--no-cache-idle-slots" not in kept.added


def test_plan_launch_leaves_no_native_cache_on() -> None:
    # Branches have a radix cache that is on by default.
    known = KNOWN | {"--radix-cache", "--no-radix-cache"}
    made = launch(known)
    assert "--no-radix-cache" in made.added and not made.has_ram_cache
    chosen = launch(known, radix_cache="on")
    assert "--no-radix-cache" not in chosen.added and chosen.has_ram_cache
    assert "--no-cache-idle-slots" in chosen.added
    turned_off = launch(known, radix_cache=Given("-no-rxc", "off"), cache_disk="0")
    assert (turned_off.warnings, turned_off.has_ram_cache) == ([], False)


def test_plan_launch_takes_one_of_llama_servers_keys() -> None:
    assert launch(api_key="one, two").api_key == "one"
    assert launch(api_key_file="keys").api_key_file == "/work/keys"
    assert launch().api_key is None


def test_what_is_added_to_a_router_with_presets_overrides_none_of_them() -> None:
    variables = {name: f"VARIABLE_OF{name}" for name in KNOWN - {"--metrics"}}
    made = launch(cache_ram="512")
    assert made.has_ram_cache
    let_presets_win(made, variables)
    assert added(made) == "--slot-save-path /cache --port 50123 --metrics"
    assert made.environment == {
        "VARIABLE_OF-np": "1",
        "VARIABLE_OF--no-cache-idle-slots": "off",
        "VARIABLE_OF--ctx-checkpoints": "16",
    }


@pytest.mark.parametrize("own", ["", "512"])
def test_preset_may_widen_the_batches_that_were_added_but_not_the_users_own(own: str) -> None:
    given = {"--batch-size": Given("-b", own)} if own else {}
    made = launch(**({"batch_size": own} if own else {}))
    narrow_batches(made, given, {"-b", "--batch-size"})
    assert made.has_narrow_batches
    let_presets_win(made, {"-b": "LLAMA_ARG_BATCH"})
    assert made.has_narrow_batches == bool(own)
    assert made.environment == ({} if own else {"LLAMA_ARG_BATCH": "512"})


def test_batches_are_as_wide_as_those_of_the_widest_preset() -> None:
    made = launch()
    presets = "[a]\nubatch-size = 1024\n[b]\nub=4096\n[c]\nLLAMA_ARG_UBATCH = 2048\n"
    narrow_batches(made, {}, {"-b", "--batch-size"}, presets + "; ub = 9999\nctx-size = 8192\n")
    let_presets_win(made, {"-b": "LLAMA_ARG_BATCH"})
    assert made.environment == {"LLAMA_ARG_BATCH": "4096"}


def test_restart_delay_doubles_up_to_a_minute() -> None:
    delays = [restart_delay_seconds(n) for n in (1, 2, 3, 7, 5000)]
    assert delays == [1.0, 2.0, 4.0, 60.0, 60.0]
