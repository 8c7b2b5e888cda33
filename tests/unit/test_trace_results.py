"""What is made of played traces: the exact cache, counters, bars, tables and what is stored."""

from dataclasses import replace
from pathlib import Path

import pytest

from proxy.core.tokens import token_ids
from proxy.metrics import Metrics
from tests.bench.document import put
from tests.bench.section import Section
from tests.bench.traces import stored
from tests.bench.traces.bars import all_sections, stripped_section, tokens_section
from tests.bench.traces.chart import draw, rows_of
from tests.bench.traces.chat import ChatFailed, read_chunks, read_events
from tests.bench.traces.exact import Exchange, exact_new_tokens
from tests.bench.traces.metrics import add_up, read_counters
from tests.bench.traces.outcomes import Outcomes
from tests.bench.traces.plan import Choice, plan
from tests.bench.traces.report import align, requests_table
from tests.bench.traces.result import Case, Failure, KeptState, RequestCost, Result
from tests.bench.traces.special import kept_bytes, special_bars
from tests.bench.traces.stored import StoredResults

CASE = Case("agent", "hybrid", "tiny", 1, "proxy")


def exchange(prompt: list[int], answer: list[int]) -> Exchange:
    return Exchange(token_ids(prompt), token_ids([*prompt, *answer]))


def result(n_evaluated: int, case: Case = CASE, *, n_exact: int = 1000, **fields: object) -> Result:
    log = {"evaluated": n_evaluated, "cuts": [50, 90]}
    requests = [RequestCost("a.1", 2000, n_exact - 1, n_evaluated, 0.5, 1.0, log)]
    requests.append(RequestCost("a.2", 2000, 1, 0, 1.5, 2.0, log))
    plain = Result(case, n_evaluated, 10.0, 4_000_000, {}, [], requests)
    return replace(plain, **fields)  # type: ignore[arg-type]


def test_exact_cache_evaluates_what_no_earlier_exchange_began_with() -> None:
    exchanges = [
        exchange([1, 2, 3], [4]),
        exchange([1, 2, 3, 4, 5], []),  # goes on behind the answer
        exchange([1, 2, 9], []),
        exchange([7], []),
    ]
    assert exact_new_tokens(exchanges) == [3, 1, 1, 1]


def test_exact_cache_evaluates_at_least_one_token() -> None:
    assert exact_new_tokens([exchange([1, 2, 3], []), exchange([1, 2, 3], [])]) == [3, 1]


def test_exact_cache_knows_nothing_of_later_requests() -> None:
    assert exact_new_tokens([exchange([1, 2], []), exchange([1, 2, 3, 4], [])]) == [2, 2]


def test_chunks_make_the_message_that_a_client_sends_back() -> None:
    chunks = [
        b'{"choices": [{"delta": {"role": "assistant", "content": null}}]}',
        b'{"choices": [{"delta": {"reasoning_content": "Well"}}]}',
        b'{"choices": [{"delta": {"content": "Yes"}}]}',
        b'{"choices": [], "timings": {"prompt_n": 3}}',
        b"[DONE]",
    ]
    message, timings = read_chunks(chunks)
    assert message == {"role": "assistant", "content": "Yes", "reasoning_content": "Well"}
    assert timings == {"prompt_n": 3}


def test_events_of_messages_tell_the_same_and_what_was_evaluated() -> None:
    usage = b'"usage": {"input_tokens": 3, "cache_creation_input_tokens": 4}'
    chunks = [
        b'{"type": "message_start", "message": {' + usage + b"}}",
        b'{"type": "content_block_delta", "delta": {"thinking": "Well"}}',
        b'{"type": "content_block_delta", "delta": {"text": "Yes"}}',
        b'{"type": "message_delta", "delta": {"stop_reason": "end_turn"}}',
        b'{"type": "message_stop"}',
    ]
    message, timings = read_events(chunks)
    assert message == {"role": "assistant", "content": "Yes", "reasoning_content": "Well"}
    assert timings == {"prompt_n": 7}
    for broken in (chunks[:-1], [], [b'{"type": "error", "error": {}}']):
        with pytest.raises(ChatFailed):
            read_events(broken)


@pytest.mark.parametrize(
    "chunks", [[], [b'{"choices": []}'], [b'{"error": {"message": "gone"}}', b"[DONE]"]]
)
def test_broken_streams_are_failures(chunks: list[bytes]) -> None:
    with pytest.raises(ChatFailed):
        read_chunks(chunks)


def test_counters_of_two_processes_add_up_without_what_was_before() -> None:
    metrics = Metrics()
    metrics.saved_bytes.inc(100)
    before = read_counters(metrics.exposition().decode())
    metrics.saved_bytes.inc(20)
    metrics.saves.labels("done").inc()
    first = read_counters(metrics.exposition().decode())
    total = add_up([first, {"saved_bytes_total": 3.0}], before)
    assert total == {"saved_bytes_total": 23.0, 'saves_total{result="done"}': 1.0}


@pytest.mark.parametrize(
    ("trace", "n_evaluated", "n_missed"),
    [("agent", 1020, 0), ("agent", 1021, 1), ("titles", 1050, 0), ("titles", 1051, 1)]
    + [("mixed", 1100, 0), ("mixed", 1101, 1)],
)
def test_bar_on_tokens_depends_on_the_trace(trace: str, n_evaluated: int, n_missed: int) -> None:
    section = tokens_section(Outcomes([result(n_evaluated, replace(CASE, trace=trace))]))
    assert section.n_missed == n_missed


def test_the_median_of_several_runs_counts() -> None:
    case = replace(CASE, trace="mixed")
    runs = [result(n, case) for n in (1500, 1050, 1040, 1099, 1200)]
    assert tokens_section(Outcomes(runs)).n_missed == 0


def test_sliding_windows_have_no_bar_without_context_checkpoints() -> None:
    stripped = replace(CASE, variant="stripped")
    kinds = [result(1200, replace(stripped, kind=kind)) for kind in ("swa", "full")]
    assert stripped_section(Outcomes(kinds)).n_missed == 1


def test_llama_server_alone_is_the_better_of_both() -> None:
    alone = [result(n, replace(CASE, variant=v)) for n, v in ((900, "alone"), (700, "alone-8192"))]  # type: ignore[arg-type]
    better = Outcomes(alone).alone(CASE)
    assert better is not None and better.n_evaluated == 700


@pytest.mark.parametrize(("n_evaluated", "is_met"), [(700, True), (701, False)])
def test_subagents_never_cost_more_than_alone(n_evaluated: int, is_met: bool) -> None:
    case = replace(CASE, trace="subagents")
    outcomes = Outcomes([result(n_evaluated, case), result(700, replace(case, variant="alone"))])
    assert [bar.is_met for bar in special_bars(outcomes)] == [is_met]


@pytest.mark.parametrize(
    ("n_evaluated", "seconds", "met"), [(1000, 5.0, [True, True]), (1001, 5.6, [False, False])]
)
def test_interleaved_on_the_small_model_saves_tokens_and_time(
    n_evaluated: int, seconds: float, met: list[bool]
) -> None:
    case = Case("interleaved", "hybrid", "small", 1, "proxy")
    alone = result(2200, replace(case, variant="alone-8192"))
    outcomes = Outcomes([result(n_evaluated, case, seconds=seconds), alone])
    assert [bar.is_met for bar in special_bars(outcomes)] == met


def test_bytes_kept_are_held_against_final_state_and_header() -> None:
    final, header = (
        KeptState(1900, 2_000_000, 1_500_000, (90,)),
        KeptState(50, 400_000, 400_000, ()),
    )
    others = KeptState(900, 600_000, 600_000, ())
    assert kept_bytes(result(1000, kept=[header, final, others])).is_met
    assert not kept_bytes(result(1000, kept=[header, final, others, others])).is_met


def test_failures_are_rows_that_miss() -> None:
    (section,) = all_sections(Outcomes([Failure(CASE, "a.3: answered 500")]))
    assert section.n_missed == 1
    assert "a.3: answered 500" in section.markdown()


def test_full_plan_measures_every_trace_on_every_memory_type() -> None:
    cases = {planned.case for planned in plan(Choice())}
    for kind in ("full", "swa", "recurrent", "hybrid"):
        assert Case("grown", kind, "tiny", 1, "proxy") in cases
        assert {c.n_slots for c in cases if c.trace == "titles" and c.kind == kind} == {1, 2, 4}
    assert not any(c.variant == "stripped" and c.kind == "swa" for c in cases)
    assert {c.trace for c in cases if c.size == "small"} == {"interleaved", "agent"}


def test_plan_of_one_trace_measures_what_its_bars_need() -> None:
    chosen = plan(Choice(traces=["titles"], kinds=["hybrid"], slots=[2]))
    assert {p.case.variant for p in chosen} == {"proxy", "alone", "alone-8192"}
    chosen = plan(Choice(traces=["mixed"], kinds=["full"], variants=["proxy"]))
    assert [p.n_times for p in chosen] == [5]
    chosen = plan(Choice(traces=["mixed"], kinds=["full"], variants=["stripped"], n_times=2))
    assert [(p.case.variant, p.n_times) for p in chosen] == [("stripped", 2)]


def test_results_are_found_again_for_the_same_inputs_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = {"proxy": "first"}
    monkeypatch.setattr(stored, "inputs_of", lambda case: inputs[case.variant])
    file = tmp_path / "results.jsonl"
    first = result(1000, kept=[KeptState(5, 6, 7, (1, 2))])
    StoredResults(file).add(first)
    assert StoredResults(file).find(CASE) == [first]
    assert StoredResults(file).find(replace(CASE, n_slots=2)) == []
    inputs["proxy"] = "second"
    assert StoredResults(file).find(CASE) == []


def test_a_line_that_was_cut_off_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "inputs_of", lambda case: "same")
    file = tmp_path / "results.jsonl"
    StoredResults(file).add(result(1000))
    file.write_bytes(file.read_bytes()[:-30])
    StoredResults(file).add(result(1001))
    assert [found.n_evaluated for found in StoredResults(file).find(CASE)] == [1001]


def test_requests_show_where_tokens_are_lost() -> None:
    table = requests_table(result(1200))
    assert "| a.1 " in table and " 201 " in table
    assert "evaluated besides requests: -1200" in table  # both lines of the log say 1200


def test_tables_are_aligned() -> None:
    assert align([("a", "n"), ("long", "1"), ("b", "12")]) == (
        "| a    |  n |\n| ---- | -: |\n| long |  1 |\n| b    | 12 |\n"
    )


def test_chart_has_a_bar_for_each_trace() -> None:
    alone = result(3000, replace(CASE, variant="alone"))
    rows = rows_of(Outcomes([result(1020), alone]), "hybrid")
    assert [(row.label, row.proxy, row.alone) for row in rows] == [("agent", 1.02, 3.0)]
    svg = draw("Tokens & more", rows)
    assert "Tokens &amp; more" in svg and ">1.02<" in svg and ">3.00<" in svg


def test_measured_tables_replace_only_what_was_measured() -> None:
    section = Section("T", "", ("a",))
    section.add("1", is_met=None)
    text = "by hand\n<!-- measured: x -->\nold\n<!-- end -->\nmore by hand\n"
    new = put(text, "x", section.markdown(2))
    assert new.startswith("by hand\n<!-- measured: x -->\n\n## T\n") and "old" not in new
    assert new.endswith("<!-- end -->\nmore by hand\n")
    assert put(new, "x", section.markdown(2)) == new
    with pytest.raises(KeyError):
        put(text, "y", "table")
