"""What Claude Code changes in what it has already sent: rows M1 to M13, and what never changes."""

import json

from proxy.core.messages import Route
from proxy.llama.answers import CallMade
from proxy.stabilize.model import Name
from tests.lab.clients import claude_code as cc
from tests.lab.clients.mutation import Body, Mutation
from tests.lab.conversation import prose

ASKED = "Make the tests of the shop pass."
ASKED_ELSE = "Explain how an order is priced."
DATE_CHANGE = {"role": "system", "content": "The date has changed. It is now 2026-11-22."}


def _row(name: str, *requests: Body, **more: object) -> Mutation:
    return Mutation(name, Route.MESSAGES, requests, **more)  # type: ignore[arg-type]


def _without_billing(body: Body) -> Body:
    return {**body, "system": body["system"][1:]}


def m1_billing_line_of_another_session() -> Mutation:
    return _row("M1", cc.request(ASKED), cc.request(ASKED_ELSE))


def m2_nonce_in_every_request() -> Mutation:
    one = cc.request(ASKED, nonce="a1b2c")
    return _row("M2", one, cc.request(ASKED, *cc.step(20), nonce="d3e4f"))


def m3_system_message_in_a_tool_loop() -> Mutation:
    steps = [*cc.step(20), *cc.step(30)]
    return _row(
        "M3", cc.request(ASKED, *steps), cc.request(ASKED, *steps, DATE_CHANGE, *cc.step(40))
    )


def m4_environment_behind_the_prompt() -> Mutation:
    return _row("M4", *(_without_billing(cc.request(prompt)) for prompt in (ASKED, ASKED_ELSE)))


def m5_another_git_status() -> Mutation:
    return _row("M5", cc.request(ASKED), cc.request(ASKED, status="modified: shop/prices.py"))


def m6_another_folder() -> Mutation:
    return _row("M6", cc.request(ASKED), cc.request(ASKED, folder="/work/store"))


def _turn(n_steps: int = 5) -> list[cc.Message]:
    return [message for i in range(n_steps) for message in cc.step(20 + 10 * i)]


def m7_old_reasoning_dropped() -> Mutation:
    later = [cc.answer(80), cc.user("Now the docs.")]
    requests = cc.request(ASKED, *_turn()), cc.request(ASKED, *_turn(), *later)
    return _row("M7", *requests, opt_in=frozenset({Name.INLINE_REASONING}))


def _call(
    call_id: str, name: str, written: str, returned: dict[str, object]
) -> tuple[CallMade, cc.Message]:
    return CallMade(call_id, name, written), cc.use(call_id, name, returned)


def m8_calls_sent_back_changed() -> Mutation:
    command = "make test 2>&1 | tail -40"
    calls = [
        _call(
            "toolu_1",
            "Bash",
            f'{{"description": "Run the tests", "command": "cd /work/shop && {command}", '
            f'"timeout": 20000.0}}',
            {"command": command, "description": "Run the tests", "timeout": 20000},
        ),
        _call(
            "toolu_2",
            "Edit",
            '{"file_path": "shop/prices.py", "old_string": "a = 1", "new_string": "a = 2"}',
            {
                "replace_all": False,
                "file_path": "shop/prices.py",
                "old_string": "a = 1",
                "new_string": "a = 2",
            },
        ),
        _call(
            "toolu_3",
            "Read",
            '{"offset": "1", "file_path": "shop/prices.py"}',
            {"file_path": "shop/prices.py", "offset": 1},
        ),
    ]
    written = [cc.use(made.call_id, made.name, _decode(made.raw_arguments)) for made, _ in calls]
    returned = [use for _, use in calls]
    requests = (
        cc.request(ASKED, *(m for use in uses for m in cc.step(20, call=use)))
        for uses in (written, returned)
    )
    return _row("M8", *requests, calls_made=tuple(made for made, _ in calls))


def m9_tool_loaded_in_mid_conversation() -> Mutation:
    search = cc.use("toolu_1", "ToolSearch", {"query": "notebook"})
    found = {"type": "tool_reference", "tool_name": "NotebookEdit"}
    before = cc.step(20)
    loaded = [
        {"role": "assistant", "content": [search]},
        {"role": "user", "content": [cc.result("toolu_1", [found])]},
    ]
    return _row(
        "M9",
        cc.request(ASKED),
        cc.request(ASKED, *before),
        cc.request(ASKED, *before, *loaded, tools=cc.tools("NotebookEdit")),
    )


def m10_request_to_compact() -> Mutation:
    steps = _turn()
    asked = cc.text(f"Summarise all of it. {prose(60, 200)}")
    last = {**steps[-1], "content": [*steps[-1]["content"], asked]}
    requests = cc.request(ASKED, *steps), cc.request(ASKED, *steps[:-1], last)
    return _row("M10 request", *requests, opt_in=frozenset({Name.GLUE_TEXT_TO_RESULTS}))


def m10_conversation_after_compaction() -> Mutation:
    summary = f"This session goes on from another. {prose(61, 900)}"
    return _row("M10 after", cc.request(ASKED, *_turn(9)), cc.request(summary), is_compaction=True)


def m11_stream_cut_by_the_server() -> Mutation:
    cut = f"{ASKED}\n"
    later = [cc.answer(70), cc.user("Your response above was cut off. Go on.")]
    messages = [cc.first_user(cut), cc.environment(), *later]
    return _row("M11", cc.request(ASKED), cc.request_with(messages, prompt=ASKED))


def m12_other_features() -> Mutation:
    return _row("M12", cc.request(ASKED), cc.request(ASKED, seed=91))


def m13_text_beside_a_tool_result() -> Mutation:
    """The client adds a text to a message that was already sent with its results alone."""
    steps = _turn(3)
    interrupted = cc.text("[Request interrupted by user]"), cc.text("Look at the docs first.")
    last = {**steps[-1], "content": [*steps[-1]["content"], *interrupted]}
    requests = cc.request(ASKED, *steps), cc.request(ASKED, *steps[:-1], last)
    return _row("M13", *requests)


def m13_text_glued() -> Mutation:
    one = m13_text_beside_a_tool_result()
    return _row("M13 glued", *one.requests, opt_in=frozenset({Name.GLUE_TEXT_TO_RESULTS}))


def tool_loop() -> Mutation:
    return _row("tool loop", cc.request(ASKED, *_turn(4)), cc.request(ASKED, *_turn(5)))


def _decode(raw: str) -> dict[str, object]:
    value: dict[str, object] = json.loads(raw)
    return value
