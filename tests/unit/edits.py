"""The edits of an answer of llama-server, of which only status and headers are known."""

from types import SimpleNamespace
from typing import Any

from proxy.explain.report import Told
from proxy.web.errors import Edit, StreamEdit, edits_of


def _request(n_found: int | None) -> Any:
    return SimpleNamespace(account=SimpleNamespace(n_reused=n_found), warms=False)


def _answer(status: int, content_type: str, length: str = "1000") -> Any:
    headers = {"Content-Type": content_type} | ({"Content-Length": length} if length else {})
    return SimpleNamespace(method="POST", status=status, headers=headers)


def edit_of_stream(path: str, n_found: int | None, diagnostics: bytes = b"") -> StreamEdit | None:
    answer = _answer(200, "text/event-stream")
    told = Told(diagnostics=diagnostics)
    return edits_of(path, answer, _request(n_found), told)[0]


def edit_of_answer(
    path: str, status: int, n_found: int | None, diagnostics: bytes = b"", length: str = "1000"
) -> Edit | None:
    answer = _answer(status, "application/json", length)
    told = Told(diagnostics=diagnostics)
    return edits_of(path, answer, _request(n_found), told)[1]
