"""An explanation as people read it, with what has changed in colour."""

from collections.abc import Iterator
from difflib import SequenceMatcher

from rich.text import Text

from proxy.core.explaining.causes import Cause, Part
from proxy.core.explaining.records import Divergence, Explanation, Nearest, RequestRecord

_COLOURS = {"hit": "green", "partial": "yellow", "miss": "red", "unanswered": "red"}
_PARTS = {
    Part.TOOLS: "in the tools",
    Part.SYSTEM: "in the system prompt",
    Part.USER: "in a message of the user",
    Part.ASSISTANT: "in an answer of the model",
    Part.TOOL_RESULT: "in a tool's result",
    Part.TEXT: "in the text",
}


def explanation_text(explanation: Explanation) -> Text:
    """Return an explanation for a terminal."""
    request = explanation.request
    lines = [_head(request), *_reuse(request)]
    if request.why:
        lines.append(Text(f"plan: {request.chosen or 'none'}, {request.why}", style="dim"))
    lines += [Text(), _cause(request), Text(explanation.says)]
    if request.cause.is_miss:
        lines.append(Text("cure: ", style="bold").append(explanation.cure, style="not bold"))
    if explanation.nearest is not None:
        lines.append(_nearest(explanation.nearest))
    if explanation.divergence is not None:
        lines += [Text(), *_difference(explanation.divergence)]
    return Text("\n").join(lines)


def _head(request: RequestRecord) -> Text:
    colour = _COLOURS.get(request.outcome, "default")
    by = f"  by {request.server}" if request.server else ""
    return Text(request.outcome, style=f"bold {colour}").append(
        f"  {request.id}  {request.path}{by}", style="not bold default"
    )


def _reuse(request: RequestRecord) -> Iterator[Text]:
    if request.n_prompt is not None and request.confirmed is not None:
        line = f"{request.confirmed:,} of {request.n_prompt:,} tokens reused"
        if request.n_missed:
            line += f", {request.n_missed:,} evaluated again"
        if (request.saved_seconds or 0) >= 0.005:
            line += f"; {request.saved_seconds:.2f} s saved"
        yield Text(line)


def _cause(request: RequestRecord) -> Text:
    text = Text(f"cause: {request.cause.value}", style="bold")
    if request.cause is Cause.HIT or request.part is Part.NOWHERE:
        return text
    place = _PARTS[request.part]
    number = "" if request.message is None else f" (message {request.message})"
    return text.append(f", {place}{number}", style="not bold")


def _nearest(nearest: Nearest) -> Text:
    if nearest.id is None:
        return Text(f"nearest: a kept state, {nearest.n_common:,} tokens in common", style="dim")
    return Text(
        f"nearest: request {nearest.id}, {nearest.age_seconds or 0:,.0f} s before, {nearest.n_common:,} "
        f"of its {nearest.n_tokens or 0:,} tokens in common",
        style="dim",
    )


def _difference(divergence: Divergence) -> Iterator[Text]:
    if not divergence.known and not divergence.now:
        yield Text(f"  known tokens: {list(divergence.known_ids)}", style="red")
        yield Text(f"  now:          {list(divergence.now_ids)}", style="green")
        return
    yield Text("  ..." + _visible(divergence.before), style="dim")
    known, now = _visible(divergence.known), _visible(divergence.now)
    matcher = SequenceMatcher(None, known, now, autojunk=False)
    old, new = Text("- ", style="red"), Text("+ ", style="green")
    for kind, i, j, k, m in matcher.get_opcodes():
        strong = kind != "equal"
        old.append(known[i:j], style="bold reverse" if strong else "")
        new.append(now[k:m], style="bold reverse" if strong else "")
    yield old
    yield new


def _visible(text: str) -> str:
    """Return a text on one line, without what a terminal would obey."""
    plain = text.replace("\n", "⏎")
    return "".join(c if c.isprintable() else "�" for c in plain)
