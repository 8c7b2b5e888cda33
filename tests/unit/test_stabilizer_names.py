"""Which stabilizers a setting switches on."""

from pathlib import Path

import pytest

from proxy.errors import SettingsError
from proxy.stabilize.model import SAFE, Name, parse_switches
from proxy.stabilize.run import OF_MESSAGES, OF_REQUESTS
from tests.lab.settings import load_settings

ALL = frozenset(Name)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("safe", SAFE),
        (" safe ", SAFE),
        ("all", ALL),
        ("none", frozenset()),
        ("sticky_date", {Name.STICKY_DATE}),
        ("safe,sticky_date", SAFE | {Name.STICKY_DATE}),
        ("safe, sticky_date , -keep_tool_order", (SAFE | {"sticky_date"}) - {"keep_tool_order"}),
        ("all, -safe", ALL - SAFE),
        ("none, sticky_date", {Name.STICKY_DATE}),
    ],
)
def test_words_are_read_from_left_to_right_in_every_source(
    tmp_path: Path, text: str, names: set[Name]
) -> None:
    assert parse_switches(text) == names
    file = tmp_path / "config.yaml"
    file.write_text(f"stabilizers: {text}\n")
    path = {"slot_save_path": str(tmp_path)}
    environment = {"LLAMA_PREFIX_CACHE_STABILIZERS": text}
    for settings in (
        load_settings(path, {}, file),
        load_settings(path, environment, None),
        load_settings({**path, "stabilizers": text}, {}, None),
    ):
        assert parse_switches(settings.stabilizers) == names


@pytest.mark.parametrize("text", ["", "sticky", "safe;all", "safe,", "-safe", "safe, - all", "off"])
def test_word_that_is_no_stabilizer_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError, match="stabilizers"):
        load_settings({"slot_save_path": str(tmp_path), "stabilizers": text}, {}, None)


def test_every_name_has_a_stabilizer_and_a_reason_in_one_line() -> None:
    assert {*OF_MESSAGES, *OF_REQUESTS} == ALL
    for stabilizer in (*OF_MESSAGES.values(), *OF_REQUESTS.values()):
        reason, _, rest = (stabilizer.__doc__ or "").partition("\n")
        assert (
            0 < len(reason) < 100 and reason.endswith(".") and not rest.partition("\n")[0].strip()
        )
