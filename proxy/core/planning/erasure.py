"""What must not be reused: other tenants' tokens, and restored states that cannot be cut.

Owns: whether a slot is erased before a request uses it. Pure.
"""

from proxy.core.model import Rule, RuleKind
from proxy.core.prefix import Namespace, TokenIds, common_prefix_length
from proxy.core.slots import Content, Empty, Known, Unknown, restored_tokens


def must_be_erased(
    rule: Rule, content: Content, namespace: Namespace, tokens: TokenIds | None = None
) -> bool:
    """Return whether llama-server must not reuse what a slot holds for *tokens* (None: not known).

    That is another tenant's tokens, or a restored state without all positions that would have to be cut
    before its end. A server that saves context checkpoints refuses to; with --swa-full it cuts the state,
    although the file has no more than a window.
    """
    if holds_foreign_tokens(content, namespace):
        return True
    n_restored = restored_tokens(content)
    if rule.kind is RuleKind.RESTORE_POINTS or n_restored == 0:
        return False
    if tokens is None or not isinstance(content, Known):
        return True
    return common_prefix_length(content.tokens, tokens) < n_restored


def holds_foreign_tokens(content: Content, namespace: Namespace) -> bool:
    """Return whether a slot holds tokens of another tenant, which llama-server would reuse."""
    match content:
        case Empty():
            return False
        case Known():
            return content.namespace != namespace
        case Unknown():
            return content.tenant != namespace
