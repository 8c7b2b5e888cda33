"""Names by which the admin listener may be asked."""

import pytest

from proxy.web.admin import is_own_name


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1:8082", "127.0.0.1", "[::1]:8082", "[::1]", "192.168.1.5:80", "localhost:8082"),
        *("gpu", "gpu:8082", "gpu.local", "gpu.LAN:8082", "proxy.internal", "a.localhost", "", "x"),
        *("llm.example.org", "LLM.example.org.:8082"),
    ],
)
def test_addresses_private_names_and_the_own_one_are_answered(host: str) -> None:
    assert is_own_name(host, "LLM.example.org")


@pytest.mark.parametrize(
    "host", ["evil.com", "evil.com:8082", "127.0.0.1.evil.com", "local.evil.com:80", "example.org"]
)
def test_names_that_anybody_can_have_are_refused(host: str) -> None:
    assert not is_own_name(host, "llm.example.org")
    assert not is_own_name(host, "")
