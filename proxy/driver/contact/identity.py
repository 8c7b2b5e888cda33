"""What can be said of a model without evaluating anything, and what that makes of its states.

Owns: the static half of a namespace (the other half is the canary) and the namespace of a tenant.
"""

import asyncio
from pathlib import Path

import msgspec
import xxhash

from proxy.core.namespace import CANARY_TOKENS
from proxy.core.prefix import Namespace, TokenIds, token_ids
from proxy.upstream.fingerprint import fingerprint_model
from proxy.upstream.llama_server import LlamaServer
from proxy.upstream.replies import Props
from proxy.upstream.state_sections import Section

Layout = tuple[int, tuple[Section, ...] | None]
"""Slot file version and the sections of a state file, as a probe save showed them."""


class Identity(msgspec.Struct, frozen=True):
    """A model with its adapters, as llama-server and the model file tell it."""

    model: str
    n_vocab: int
    n_params: int
    size_bytes: int
    modalities: dict[str, object]
    adapters: tuple[tuple[int, str, float], ...]


async def read_identity(upstream: LlamaServer, props: Props) -> Identity:
    """Ask llama-server for its model and read the file if it is readable; raises UpstreamFault."""
    meta = await upstream.model_meta()
    adapters = await upstream.lora_adapters()
    path = Path(props.model_path)
    fingerprint = await asyncio.to_thread(fingerprint_model, path)
    return Identity(
        model=fingerprint or f"{path} {meta.size}",
        n_vocab=meta.n_vocab,
        n_params=meta.n_params,
        size_bytes=meta.size,
        modalities=props.modalities,
        adapters=tuple((a.id, a.path, a.scale) for a in adapters),
    )


def canary_tokens(identity: Identity) -> tuple[TokenIds, TokenIds]:
    """Return the canary's tokens, and the one that is evaluated in another slot."""
    fixed = token_ids(token % max(1, identity.n_vocab) for token in CANARY_TOKENS)
    return fixed[:-1], fixed[-1:]


def static_key(identity: Identity, layout: Layout) -> str:
    """Return the key under which the namespaces of a model and a cache layout are known."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode([identity, layout]))


def tenant_namespace(model_namespace: Namespace | None, tenant: bytes) -> Namespace:
    """Return the namespace of one tenant of a model."""
    digest = xxhash.xxh3_128(model_namespace or b"no model namespace")
    digest.update(tenant)
    return Namespace(digest.digest())
