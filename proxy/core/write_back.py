"""When and where a dirty slot is saved.

Owns: what of a slot's content a save could make durable, and whether that is worth a file. Pure.
"""

from dataclasses import replace

from proxy.core.cuts import SLACK_TOKENS
from proxy.core.model import Rule, RuleKind
from proxy.core.prefix import BLOCK_TOKENS
from proxy.core.slots import Content, Known, Unknown


def at_savable_point(rule: Rule, content: Known) -> Known | None:
    """Return *content* cut back to where a save of it helps, or None if nowhere.

    Under *end only* that is the last cut: what was generated behind it does not come back token for
    token, and the state could not be rewound. Elsewhere the slot is saved as it stands.
    """
    match rule.kind:
        case RuleKind.NOTHING:
            return None
        case RuleKind.END_ONLY:
            if not content.last_cut:
                return None
            return _cut_to(content, content.last_cut)
        case RuleKind.RESTORE_POINTS | RuleKind.ANY_PREFIX:
            return content


def _cut_to(content: Known, n_tokens: int) -> Known:
    """Return *content* without what lies behind its first *n_tokens*, cuts included."""
    return replace(
        content,
        tokens=content.tokens[:n_tokens],
        n_tail=0,
        header=content.header if content.header <= n_tokens else 0,
        turn_start=content.turn_start if content.turn_start <= n_tokens else 0,
    )


def is_write_back_due(rule: Rule, content: Content) -> bool:
    """Return whether a free slot holds work that no file has."""
    if isinstance(content, Unknown):
        return content.can_be_adopted and rule.can_restore
    if not isinstance(content, Known):
        return False
    savable = at_savable_point(rule, content)
    return (
        savable is not None
        and savable.n_tokens >= max(BLOCK_TOKENS, _shortest_useful(rule))
        and savable.n_unsaved > SLACK_TOKENS
    )


def _shortest_useful(rule: Rule) -> int:
    return rule.end_holds_from if rule.kind is RuleKind.END_ONLY else 0
