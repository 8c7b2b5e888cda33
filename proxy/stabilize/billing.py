"""drop_billing_header: the line that Claude Code writes in front of its system prompt.

`x-anthropic-billing-header: cc_version=...; cch=...;` holds digits that depend on the first user text
and, in some versions, on the request. llama-server masks `cch` only (server-chat.cpp).
"""

import re

from proxy.stabilize.messages import rewrite_system_texts
from proxy.stabilize.model import Facts, Form, FromBody, Json, Rewrite
from proxy.stabilize.names import Name

_HEADERS = re.compile(r"\A(?:x-anthropic-billing-header:[^\n]*(?:\n+|\Z))+")


def _drop(form: Form, body: Json, facts: Facts) -> Rewrite | None:
    changed, edits = rewrite_system_texts(form, body, lambda text: _HEADERS.sub("", text))
    return Rewrite(changed, edits) if edits else None


STABILIZER = FromBody(Name.DROP_BILLING_HEADER, frozenset(Form), _drop)
