"""What keeps llama-servers that should share states from sharing them: pure."""

from collections.abc import Iterator
from itertools import groupby

from proxy.core.namespace import is_same_canary
from proxy.doctor.facts import Facts, StateFacts
from proxy.doctor.survey_facts import Survey
from proxy.doctor.verdict import Finding, blocker, limit, ok

SHARING = "sharing"


def sharing_findings(survey: Survey) -> Iterator[Finding]:
    """Yield whether all llama-servers with one model can continue each other's states.

    Those at addresses of their own should have the same; those of hosts if they have the same name.
    """

    def model(facts: Facts) -> str:
        return facts.server.name if facts.server.host else ""

    for _, group in groupby(sorted(survey.llama_servers, key=model), key=model):
        first, *others = group
        found = [finding for other in others for finding in _between(first, other)]
        yield from found
        compared = [f for f in (first, *others) if f.states is not None]
        if others and not found and len(compared) == len(others) + 1:
            names = ", ".join(facts.server.name for facts in compared)
            yield ok(SHARING, f"A state of any of them can be continued by the others: {names}.")


def _between(left: Facts, right: Facts) -> Iterator[Finding]:
    names = f"{left.server.name} and {right.server.name}"
    if left.states is not None and right.states is not None:
        yield from _difference(names, left, right, left.states, right.states)
    sizes = (left.server.n_ctx, right.server.n_ctx)
    if 0 not in sizes and sizes[0] != sizes[1]:
        yield limit(
            SHARING,
            f"A slot of {names} has {sizes[0]:,} and {sizes[1]:,} tokens: clients can rely on the"
            " smaller only.",
            "Start both with the same -c and -np",
        )


def _difference(
    names: str, left: Facts, right: Facts, ours: StateFacts, theirs: StateFacts
) -> Iterator[Finding]:
    is_same_answer = is_same_canary(ours.canary, theirs.canary)
    is_same_file = ours.model == theirs.model
    may_be_same = is_same_answer and not (ours.is_model_read and theirs.is_model_read)
    if ours.numbers != theirs.numbers or not (is_same_file or may_be_same):
        yield blocker(
            SHARING,
            f"{names} serve different models ({left.server.model} and {right.server.model}), but"
            " requests go to either.",
            "Start all llama-servers of one upstream with the same model; for several models use"
            " llama-server's router or llama-swap, or a proxy for each.",
        )
    elif ours.adapters != theirs.adapters:
        yield _not_shared(f"{names} have different adapters", "Start both with the same --lora")
    elif not is_same_file:
        yield _not_shared(
            f"{names} have the model under different paths, and its file cannot be read here",
            "Give them the same path, or let the proxy read the model's file",
        )
    elif ours.layout != theirs.layout:
        yield _not_shared(
            f"{names} keep their states in different forms",
            "Start both with the same -fa, -ctk, -ctv, -kvu and --swa-full, from the same build",
        )
    elif not is_same_answer:
        yield _not_shared(
            f"{names} have the same model, but predict differently with it",
            "Start both with the same --rope-* flags and --override-kv",
        )


def _not_shared(why: str, cure: str) -> Finding:
    return limit(SHARING, f"{why}: neither can continue a state of the other.", cure)
