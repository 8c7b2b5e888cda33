"""Traces without texts: what they keep of requests and what they do not tell, and prompts made of them."""

from collections.abc import Iterator

import msgspec
import pytest

from proxy.cli.command import Exit, RunningProxy
from proxy.cli.trace import _flags, send_all, share_known, texts_of, trace_in_words, words_for
from proxy.core.model import Prompt
from proxy.core.tokens import token_ids
from proxy.explain.views import TracedRequest, numbered, traced
from tests.unit.builders import NAMESPACE, OTHER_NAMESPACE

FIRST = list(range(1100))
ON = [*FIRST, *range(5000, 5600)]
FORK = [*FIRST[:600], *range(9000, 9600)]
N = 1700000000.25


def asked(tokens: list[int], seconds: float, n_answer: int = 9) -> TracedRequest:
    return traced(N + seconds, Prompt(token_ids(tokens), NAMESPACE), n_answer)


def test_prompts_have_the_same_number_as_far_as_they_are_the_same() -> None:
    trace = numbered([asked(FIRST, 0), asked(ON, 7.9), asked(FORK, 12), asked(FIRST, 13)])
    ids = [list(request.hash_ids) for request in trace]
    assert ids == [[0, 1, 2], [0, 1, 3, 4], [0, 5, 6], [0, 1, 2]]
    assert [request.timestamp for request in trace] == [0, 7000, 12000, 13000]
    assert [request.input_length for request in trace] == [1100, 1700, 1200, 1100]
    assert share_known(trace) == (1024 + 512 + 1099) / 5100


def test_of_what_was_asked_only_order_lengths_and_seconds_are_told() -> None:
    """Other texts that share as much make the same trace, another tenant's states share nothing."""
    other = [[token + 50_000 for token in tokens] for tokens in (FIRST, ON)]
    told = numbered([asked(ON, 30.2), asked(FIRST, 0.3)])
    assert told == numbered([asked(other[0], 86400), asked(other[1], 86429.8)])
    of_other = traced(N + 1, Prompt(token_ids(FIRST), OTHER_NAMESPACE), 1)
    assert [*numbered([asked(FIRST, 0), of_other])[1].hash_ids] == [3, 4, 5]


def test_equal_numbers_are_equal_texts_of_about_the_same_length() -> None:
    trace = numbered([asked(FIRST, 0), asked(FORK, 1), asked(ON, 2)])
    text_of = texts_of(trace)
    first, fork, on = (words_for(request, text_of, 0.5) for request in trace)
    assert [len(text.split()) for text in (first, fork, on)] == [550, 600, 850]
    assert on.startswith(first), "the end of a prompt is the beginning of the block that goes on"
    n_same = 512 // 2
    assert fork.split()[:n_same] == first.split()[:n_same]
    assert fork.split()[n_same : n_same + 9] != first.split()[n_same : n_same + 9]


def test_trace_in_words_has_its_numbers() -> None:
    told = trace_in_words(numbered([asked(FIRST, 0), asked(ON, 7200)]))
    assert told["prompts"] == "1,100 to 1,700 tokens, median 1,400"
    assert told["blocks"].startswith("5 different ones")
    assert told["known"].startswith("36.6%")


def test_flags_in_a_report_have_no_names_and_keys() -> None:
    line = "/home/ann/llama-server -m /home/ann/q.gguf -c 65536 -fa on --api-key 123 -ctk q8_0 --alias ann"
    assert _flags(line) == [
        "-m",
        "-c",
        "65536",
        "-fa",
        "on",
        "--api-key",
        "-ctk",
        "q8_0",
        "--alias",
    ]


def test_share_that_can_be_reused_leaves_out_what_was_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answer(_: object, path: str, *, body: bytes, **__: object) -> Iterator[dict[str, object]]:
        n_prompt = len(msgspec.json.decode(body)["prompt"].split())
        return iter([{"usage": {"prompt_tokens": n_prompt}}] * (n_prompt < 4096))

    monkeypatch.setattr(RunningProxy, "lines", answer)
    short, long = TracedRequest(0, 1024, 1, (0, 1)), TracedRequest(0, 8192, 1, range(16))
    server = RunningProxy("http://127.0.0.1:1", is_admin=False)
    figures = send_all([short, short, long, long], server, "")
    assert figures["failed"] == 2
    assert figures["share in known blocks"] == round(1023 / 2048, 4)


@pytest.mark.parametrize("usage", [{"completion_tokens": 1}, {"prompt_tokens": 0}, {}])
def test_server_that_counts_no_prompt_tokens_ends_a_replay_with_a_message(
    usage: dict[str, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(RunningProxy, "lines", lambda *_, **__: iter([{"usage": usage}]))
    with pytest.raises(SystemExit) as exited:
        send_all([asked(FIRST, 0)], RunningProxy("http://127.0.0.1:1", is_admin=False), "")
    assert exited.value.code == Exit.UNAVAILABLE
    assert "gives no answer that counts its tokens" in capsys.readouterr().err
