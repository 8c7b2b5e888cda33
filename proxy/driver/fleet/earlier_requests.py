"""Requests made again from the journal: their tokens are known, their bodies are not.

Owns: what is asked of llama-server then. The tokens are evaluated as a bare prompt, in the namespace of
whoever sent them first, so that the next request of theirs finds the state.
"""

import secrets
from collections.abc import Mapping

from proxy.core.explaining.records import Explanation
from proxy.core.prefix import Namespace, TokenIds
from proxy.driver.contact.attachment import Attachment
from proxy.driver.fleet.fleet import Fleet
from proxy.driver.reporting.journal import Journal, Keep
from proxy.driver.requests import Arrival, GenerationRequest
from proxy.errors import CacheFault
from proxy.upstream.header_bodies import tokens_request
from proxy.upstream.llama_server import LlamaServer
from proxy.upstream.routes import Route

_PATH = "/completion"


class NotKnown(CacheFault):
    """A request cannot be made again; the message says why."""


class EarlierRequests:
    """Makes requests again whose prompts the journal has kept."""

    def __init__(self, journal: Journal, fleet: Fleet) -> None:
        self._journal = journal
        self._fleet = fleet

    def again(
        self, request_id: str, keys: Mapping[str, str], *, is_whole: bool
    ) -> GenerationRequest:
        """Return a request that evaluates the header of an earlier one, or all of it; raises NotKnown.

        A header that was not found is all of the prompt. Without *keys* the proxy's own one is used.
        """
        explanation = self._journal.explain(request_id)
        if explanation is None:
            raise NotKnown(self._journal.why_unknown(request_id))
        namespace, tokens = self._prompt(explanation)
        upstream, tenant = self._owner(namespace)
        n_header = explanation.way.cuts[0] if explanation.way else 0
        wanted = tokens if is_whole or not n_header else tokens[:n_header]
        return GenerationRequest(
            arrival=Arrival(secrets.token_hex(4), _PATH),
            route=Route.COMPLETION,
            raw=tokens_request(wanted, upstream.target.model),
            headers=keys or upstream.own_headers,
            tenant=tenant,
            model=upstream.target.model,
        )

    def _owner(self, namespace: Namespace) -> tuple[LlamaServer, bytes]:
        """Return the llama-server that serves a namespace, and its tenant."""
        sessions = [s for b in self._fleet.backends if (s := b.lifecycle.current)]
        if not sessions:
            raise NotKnown("llama-server is not attached: /health says why")
        for session in sessions:
            tenant = _tenant(session.attachment, namespace)
            if tenant is not None:
                return session.upstream, tenant
        raise NotKnown("llama-server has another model, other adapters or other settings since")

    def _prompt(self, explanation: Explanation) -> tuple[Namespace, TokenIds]:
        if self._journal.keep is Keep.NONE:
            raise NotKnown("no prompts are kept: explain_keep is none")
        prompts, request = self._journal.prompts, explanation.request
        if (known := prompts.find(request.id)) is None:
            if request.n_prompt is None:
                raise NotKnown(f"the prompt of {request.id} was never read: {request.why}")
            raise NotKnown(f"the prompt of {request.id} is no longer kept")
        return known.namespace, prompts.tokens(known)


def _tenant(attachment: Attachment, namespace: Namespace) -> bytes | None:
    tenants = (b"", *attachment.tenants)
    return next((t for t in tenants if attachment.tenant_namespace(t) == namespace), None)
