"""What counts as metrics of llama-server, and what must not get into our own answer."""

import pytest

from proxy.errors import UpstreamRefused
from proxy.upstream.exposition import check_exposition


def test_metrics_end_with_a_line_end() -> None:
    text = b"# TYPE llamacpp:n_tokens_max counter\nllamacpp:n_tokens_max 0"
    assert check_exposition(text) == check_exposition(text + b"\n") == text + b"\n"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<html><body>404</body></html>",
        b'{"error": {"code": 501}}',
        b"llamacpp:prompt_tokens_total many\n",
        b"llamacpp:prompt_tokens_total 1\nllamacpp:requests_proc",
        b"llamacpp:prompt_tokens_total 1\nllama_prefix_cache_state 1\n",
        b"llamacpp:n \xff\n",
    ],
)
def test_anything_else_is_refused(content: bytes) -> None:
    with pytest.raises(UpstreamRefused):
        check_exposition(content)
