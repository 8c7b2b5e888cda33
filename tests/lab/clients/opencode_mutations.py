"""What OpenCode changes in what it has already sent: rows O1 to O11."""

from proxy.core.messages import Route
from proxy.llama.answers import CallMade
from proxy.stabilize.model import Name
from tests.lab.clients import opencode as oc
from tests.lab.clients.mutation import Body, Mutation
from tests.lab.conversation import prose

ASKED = oc.user("Make the tests of the shop pass.")


def _row(name: str, *requests: Body, **more: object) -> Mutation:
    return Mutation(name, Route.CHAT, requests, **more)  # type: ignore[arg-type]


def _turn(n_steps: int = 4, seed: int = 20) -> list[oc.Message]:
    return [message for i in range(n_steps) for message in oc.step(seed + 10 * i)]


def o1_date_at_midnight() -> Mutation:
    one = oc.request(ASKED)
    before = oc.request(ASKED, *_turn())
    after = oc.request(ASKED, *_turn(), *oc.step(70), date="Sun Nov 22 2026")
    return _row("O1", one, before, after, opt_in=frozenset({Name.STICKY_DATE}))


def o2_another_folder() -> Mutation:
    return _row("O2", oc.request(ASKED), oc.request(ASKED, folder="/work/store"))


def o3_other_rules() -> Mutation:
    return _row("O3", oc.request(ASKED), oc.request(ASKED, rules="Never write tests."))


def o4_plan_to_build() -> Mutation:
    turn = [ASKED, *_turn(), oc.answer(70)]
    requests = (
        oc.request(ASKED, is_plan=True),
        oc.request(*turn, is_plan=True),
        oc.request(*turn, oc.user("Do it.")),
    )
    opt_in = {Name.STICKY_TOOL_TEXT, Name.INLINE_REASONING}
    return _row("O4", *requests, opt_in=frozenset(opt_in))


def o5_reminder_moves_to_the_newest_message() -> Mutation:
    task = "Plan how the tests of the shop could pass."
    later = [*_turn(8), oc.answer(120)]
    requests = (
        oc.request(oc.user(task, oc.PLAN)),
        oc.request(oc.user(task, oc.PLAN), *later),
        oc.request(oc.user(task), *later, oc.user("Do it.", oc.BUILD)),
    )
    opt_in = {Name.STICKY_REMINDERS, Name.INLINE_REASONING}
    return _row("O5", *requests, opt_in=frozenset(opt_in))


def o6_request_to_compact() -> Mutation:
    transcript = oc.user(prose(60, 2500))
    summarise = {"messages": [{"role": "system", "content": prose(61, 200)}, transcript]}
    return _row("O6 request", oc.request(ASKED, *_turn(9)), summarise, is_compaction=True)


def o6_conversation_after_compaction() -> Mutation:
    summary = {"role": "assistant", "content": prose(62, 900)}
    after = [oc.user("What did we do so far?"), summary, *oc.step(100), oc.user("Continue.")]
    before = oc.request(ASKED, *_turn(9))
    return _row("O6 after", before, oc.request(*after), is_compaction=True)


def o7_old_results_cleared() -> Mutation:
    before = _turn(6)
    cleared = [
        {**m, "content": "[Old tool result content cleared]"} if m["role"] == "tool" else m
        for m in before[:-2]
    ]
    return _row("O7", oc.request(ASKED, *before), oc.request(ASKED, *cleared, *before[-2:]))


def _sent_back(call_id: str, name: str, written: str, returned_as: str, returned: str) -> Mutation:
    requests = (
        oc.request(ASKED, *oc.step(20, oc.call(call_id, *sent)))
        for sent in ((name, written), (returned_as, returned))
    )
    return _row("O8", *requests, calls_made=(CallMade(call_id, name, written),))


def o8_arguments_minified() -> Mutation:
    written = '{"path": "caf\\u00e9.py", "limit": 20000.0}'
    return _sent_back("call_1", "read", written, "read", '{"path":"café.py","limit":20000}')


def o8_call_refused_by_the_client() -> Mutation:
    returned = '{"tool":"reed","error":"There is no tool of that name."}'
    row = _sent_back("call_1", "reed", '{"path": "shop/prices.py"}', "invalid", returned)
    return _row("O8 invalid", *row.requests, calls_made=row.calls_made)


def o9_retry_after_a_cut_stream() -> Mutation:
    partial = {"role": "assistant", "content": prose(63, 20)}
    return _row("O9", oc.request(ASKED), oc.request(ASKED, partial, ASKED))


def o10_continued_session() -> Mutation:
    turn = [ASKED, *_turn(), oc.answer(70)]
    requests = oc.request(ASKED, *_turn()), oc.request(*turn, oc.user("Now the docs."))
    return _row("O10", *requests, opt_in=frozenset({Name.INLINE_REASONING}))


def o11_fresh_session() -> Mutation:
    return _row("O11", oc.request(ASKED), oc.request(oc.user("Explain how an order is priced.")))


def tool_loop() -> Mutation:
    return _row("tool loop", oc.request(ASKED, *_turn(4)), oc.request(ASKED, *_turn(5)))
