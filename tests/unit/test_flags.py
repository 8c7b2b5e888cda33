"""How llama-server's --help and its command line are read."""

import pytest

from proxy.core.launch import Flag, Given, known_names, parse_help, read_given

HELP = """\
----- common params -----

-h,    --help, --usage                  print usage and exit
-ot,   --override-tensor <tensor name pattern>=<buffer type>,...
                                        override tensor buffer type
                                        (env: LLAMA_ARG_OVERRIDE_TENSOR)
--control-vector-layer-range START END
                                        layer range, end inclusive


----- example-specific params -----

-np,   --parallel N                     number of server slots (default: -1, -1 = auto)
                                        (env: LLAMA_ARG_N_PARALLEL)
-ctxcp, --ctx-checkpoints, --swa-checkpoints N
                                        max number of context checkpoints to create per slot (default:
                                        32)[(more info)](https://github.com/ggml-org/llama.cpp/pull/15293)
                                        (env: LLAMA_ARG_CTX_CHECKPOINTS)
-kvu,  --kv-unified, -no-kvu, --no-kv-unified
                                        use single unified KV buffer shared across all sequences
                                        (env: LLAMA_ARG_KV_UNIFIED)
--repack, -nr, --no-repack              whether to enable weight repacking (default: enabled)
                                        (env: LLAMA_ARG_REPACK)
--metrics                               enable prometheus compatible metrics endpoint (default: disabled)
                                        (env: LLAMA_ARG_ENDPOINT_METRICS)
--api-key KEY                           API key to use for authentication
                                        (env: LLAMA_API_KEY)
--fim-qwen-1.5b-default                 use default Qwen 2.5 Coder 1.5B
"""
OPTIONS = parse_help(HELP)


def given(*arguments: str, **environment: str) -> dict[str, Given]:
    return read_given(OPTIONS, arguments, environment)


def test_parse_help_finds_all_names_the_number_of_values_and_the_variable() -> None:
    assert OPTIONS == [
        Flag(("-h", "--help", "--usage"), 0),
        Flag(("-ot", "--override-tensor"), 1, "LLAMA_ARG_OVERRIDE_TENSOR"),
        Flag(("--control-vector-layer-range",), 2),
        Flag(("-np", "--parallel"), 1, "LLAMA_ARG_N_PARALLEL"),
        Flag(("-ctxcp", "--ctx-checkpoints", "--swa-checkpoints"), 1, "LLAMA_ARG_CTX_CHECKPOINTS"),
        Flag(("-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified"), 0, "LLAMA_ARG_KV_UNIFIED"),
        Flag(("--repack", "-nr", "--no-repack"), 0, "LLAMA_ARG_REPACK"),
        Flag(("--metrics",), 0, "LLAMA_ARG_ENDPOINT_METRICS"),
        Flag(("--api-key",), 1, "LLAMA_API_KEY"),
        Flag(("--fim-qwen-1.5b-default",), 0),
    ]


@pytest.mark.parametrize("text", ["", "usage: ls [OPTION]...\n\n  -a, --all  do not ignore\n"])
def test_parse_help_of_another_program_knows_no_option_of_llama_server(text: str) -> None:
    assert "--slot-save-path" not in known_names(parse_help(text))


def test_read_given_finds_a_value_under_every_name() -> None:
    found = given("-np", "2")
    assert found["--parallel"] == found["-np"] == Given("-np", "2")
    assert given("--parallel", "-1")["-np"] == Given("--parallel", "-1")


def test_read_given_takes_underscores_and_the_last_of_two() -> None:
    assert given("-ctxcp", "4", "--ctx_checkpoints", "6")["--swa-checkpoints"].value == "6"


def test_read_given_takes_no_value_for_an_option() -> None:
    assert set(given("--api-key", "--metrics")) == {"--api-key"}
    assert set(given("--control-vector-layer-range", "--metrics", "-np")) == {
        "--control-vector-layer-range"
    }
    assert given("--api-key")["--api-key"].value == ""
    assert given("--unknown", "--metrics")["--metrics"].value == "on"


def test_read_given_of_a_switch_tells_on_from_off() -> None:
    assert given("-no-kvu")["--kv-unified"].value == "off"
    assert given("-nr")["--repack"].value == "off"
    assert given("--no-kv-unified", "-kvu")["--no-kv-unified"].value == "on"
    assert str(given("-kvu")["-kvu"]) == "-kvu"


def test_read_given_of_the_environment_is_beaten_by_a_flag() -> None:
    assert str(given(LLAMA_ARG_N_PARALLEL="4")["-np"]) == "LLAMA_ARG_N_PARALLEL=4"
    assert given("-np", "2", LLAMA_ARG_N_PARALLEL="4")["-np"].value == "2"


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("LLAMA_ARG_KV_UNIFIED", "1", "on"),
        ("LLAMA_ARG_KV_UNIFIED", "off", "off"),
        ("LLAMA_ARG_NO_KV_UNIFIED", "", "off"),
        ("LLAMA_ARG_ENDPOINT_METRICS", "enabled", "on"),
    ],
)
def test_read_given_of_a_switch_in_the_environment(
    variable: str, value: str, expected: str
) -> None:
    (found,) = {g.value for g in given(**{variable: value}).values()}
    assert found == expected


def test_read_given_of_a_switch_that_cannot_be_turned_off_ignores_false() -> None:
    assert given(LLAMA_ARG_ENDPOINT_METRICS="0") == {}
