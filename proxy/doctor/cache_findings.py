"""What there is to say of saved states: what they are good for, what they cost, and whose they are."""

from collections.abc import Iterator

from proxy.core.model import Rule, RuleKind
from proxy.core.slots import MAX_CONTEXT_CHECKPOINTS
from proxy.doctor.directory_findings import USUAL_TOKENS
from proxy.doctor.facts import CostFacts, Facts, MemoryFacts, StoreFacts
from proxy.doctor.verdict import Finding, blocker, limit, ok
from proxy.doctor.words import counted, seconds, size

SLOT_FILES, RULE, COST, STORE = "slot files", "memory rule", "cost", "checkpoints"
LONGEST_STALL_SECONDS = 10.0
"""A save that stops every slot for longer is called a limit."""
_FIRST_VERSION_WITH_CONTEXT_CHECKPOINTS = 4


def memory_findings(memory: MemoryFacts) -> Iterator[Finding]:
    """Yield what a state file is and what it is good for."""
    if memory.is_version_supported:
        kinds = " + ".join(memory.sections) or "of a kind that is not known"
        yield ok(SLOT_FILES, f"Version {memory.file_version}; memory: {kinds}.")
    else:
        yield limit(
            SLOT_FILES,
            f"Version {memory.file_version} is not known here: states are restored at their end only.",
            "Use a newer llama-prefix-cache, or llama.cpp 0.7.0 (version 4).",
        )
    if memory.rule is None:
        return
    yield _rule_finding(memory, memory.rule)
    if memory.remembered_rule is not None and memory.remembered_rule.kind is not memory.rule.kind:
        yield ok(
            RULE,
            f"The index remembers another one, {memory.remembered_rule.kind.value}: llama-server ran"
            " with other flags then. A proxy begins with that one, and measures again once restores"
            " contradict it.",
        )


def _beside_finding() -> Finding:
    return limit(
        RULE,
        "Two slots that restore a state at once do not both continue from it.",
        "Start llama-server with -np 1, or use another build of llama.cpp.",
    )


def _rule_finding(memory: MemoryFacts, rule: Rule) -> Finding:
    shortest = (
        f" A state under {rule.end_holds_from:,} tokens cannot be continued at its end."
        if rule.end_holds_from
        else ""
    )
    match rule.kind:
        case RuleKind.ANY_PREFIX:
            return ok(RULE, "Any prefix: any leading part of a saved state can be reused.")
        case RuleKind.RESTORE_POINTS:
            return ok(
                RULE,
                "Restore points: a saved state can be continued at its end and at the"
                f" context checkpoints in its file.{shortest}",
            )
        case RuleKind.END_ONLY:
            return limit(
                RULE,
                "End only: a saved state can be continued at its very end and nowhere"
                f" before, so prompts that were rewritten near their end start over.{shortest}",
                _end_only_cure(memory),
            )
        case RuleKind.NOTHING:
            return blocker(
                RULE,
                "Nothing: llama-server restores states of this model and then evaluates"
                " every token again.",
                _nothing_cure(memory),
            )


def _end_only_cure(memory: MemoryFacts) -> str:
    cure = (
        "Use llama.cpp 0.7.0 or later, which saves context checkpoints too"
        if memory.file_version < _FIRST_VERSION_WITH_CONTEXT_CHECKPOINTS
        else f"Start llama-server without --ctx-checkpoints 0 (the default is {MAX_CONTEXT_CHECKPOINTS})"
    )
    return f"{cure}; or with --swa-full" if memory.may_have_sliding_window else cure


def _nothing_cure(memory: MemoryFacts) -> str:
    if memory.may_have_sliding_window:
        other = (
            "use llama.cpp 0.7.0 or later"
            if memory.file_version < _FIRST_VERSION_WITH_CONTEXT_CHECKPOINTS
            else "start it without --ctx-checkpoints 0"
        )
        return (
            "This model has a sliding window: start llama-server with --swa-full (it takes more"
            f" memory), or {other}."
        )
    return "Restart llama-server and run doctor again; if it stays so, this build cannot do it."


def cost_finding(cost: CostFacts) -> Finding:
    """Return what 10,000 tokens cost on disk, and in seconds for everybody."""
    least, most = cost.state_bytes(USUAL_TOKENS), cost.largest_state_bytes(USUAL_TOKENS)
    stall_seconds = most / cost.save_bytes_per_second
    bytes_text = f"{size(least)} for {USUAL_TOKENS:,} tokens"
    if cost.context_checkpoint_bytes:
        bytes_text += f", up to {size(most)} with {MAX_CONTEXT_CHECKPOINTS} context checkpoints"
    text = (
        f"A state takes {bytes_text}. Saving it stops all slots for {seconds(stall_seconds)};"
        f" restoring takes {seconds(most / cost.restore_bytes_per_second)} instead of"
        f" {seconds(USUAL_TOKENS / cost.evaluate_tokens_per_second)} of evaluation."
    )
    if stall_seconds <= LONGEST_STALL_SECONDS:
        return ok(COST, text)
    return limit(COST, text, "Put the directory of --slot-save-path on a faster disk.")


def store_finding(store: StoreFacts, directory: str, *, has_others: bool = False) -> Finding:
    """Return whose checkpoints lie in the directory; *has_others* if other models use it too."""
    empty_it = f"stop the proxy and delete {directory}/index and {directory}/lpc-*.state"
    if store.problem:
        return blocker(
            STORE,
            f"{store.problem}.",
            f"Run doctor and the proxy as the user who made it; or start afresh: {empty_it}",
        )
    if not store.n_checkpoints:
        return ok(STORE, "None yet.")
    have = f"{counted(store.n_checkpoints, 'checkpoint')} ({size(store.size_bytes)})"
    if store.n_usable:
        return ok(
            STORE,
            f"{have}; {store.n_usable} ({size(store.usable_bytes)}) fit the model that runs now.",
        )
    if store.knows_model_otherwise:
        return limit(
            STORE,
            f"{have}, none of which fits: the model is known, but with another cache layout or other"
            " adapters.",
            "Start llama-server as it was started then (-np, -kvu, -fa, --cache-type-k, --cache-type-v,"
            " --lora, build); or leave them, they go when space is needed.",
        )
    if has_others:
        return ok(STORE, f"{have}, none of this model yet.")
    return limit(
        STORE,
        f"{have}, all of another model than the one that runs now: they cannot serve it, and they"
        " take up the budget until newer ones push them out.",
        "Start llama-server with the model they were made by, or give each model a --slot-save-path"
        f" of its own; to be rid of them, {empty_it}",
    )


def cache_findings(facts: Facts) -> Iterator[Finding]:
    """Yield all that there is to say of states and checkpoints."""
    if facts.memory is not None:
        yield from memory_findings(facts.memory)
        # Where slots are cleared that follows from it, and is mended with it.
        if facts.memory.restores_beside is False and facts.behaviour.keeps_idle_slots is not False:
            yield _beside_finding()
    if facts.cost is not None:
        yield cost_finding(facts.cost)
    if facts.store is not None:
        has_others = bool(facts.server.host)
        yield store_finding(facts.store, facts.directory.path, has_others=has_others)
