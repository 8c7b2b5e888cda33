"""Which directories are private enough for states."""

import pytest

from proxy.store.files import is_private


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (0o700, True),
        (0o2770, True),
        (0o2700, True),
        (0o770, False),
        (0o750, False),
        (0o755, False),
        (0o2775, False),
        (0o777, False),
        (0o701, False),
    ],
)
def test_directory_is_private_to_its_owner_or_to_one_group_on_purpose(
    mode: int, expected: bool
) -> None:
    assert is_private(mode) is expected
