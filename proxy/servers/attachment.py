"""What the proxy knows about a llama-server process and its model, and what the index keeps of that."""

import asyncio
from pathlib import Path

import msgspec
import xxhash

from proxy.core.model import CANARY_TOKENS, tenant_namespace
from proxy.core.rates import Rates
from proxy.core.rule import SelfTestResult
from proxy.core.saving import StateSize
from proxy.core.tokens import Namespace, TokenIds, token_ids
from proxy.llama.client import LlamaServer, Props
from proxy.llama.model_file import fingerprint_model
from proxy.llama.state_file import Section
from proxy.serving.process import Process
from proxy.store.known_models import asking_name, known_tenants, tenants_name
from proxy.store.store import CheckpointStore

# What can be said of a model without evaluating anything.
#
# Owns: the static half of a namespace (the other half is the canary).


Layout = tuple[int, tuple[Section, ...] | None]
"""Slot file version and the sections of a state file, as a probe save showed them."""


class ModelIdentity(msgspec.Struct, frozen=True):
    """A model with its adapters, as llama-server and the model file tell it."""

    model: str
    n_vocab: int
    n_params: int
    size_bytes: int
    modalities: dict[str, object]
    adapters: tuple[tuple[int, str, float], ...]


async def read_identity(upstream: LlamaServer, props: Props) -> ModelIdentity:
    """Ask llama-server for its model and read the file if it is readable; raises UpstreamFault."""
    meta = await upstream.model_meta()
    adapters = await upstream.lora_adapters()
    path = Path(props.model_path)
    fingerprint = await asyncio.to_thread(fingerprint_model, path)
    return ModelIdentity(
        model=fingerprint or f"{path} {meta.size}",
        n_vocab=meta.n_vocab,
        n_params=meta.n_params,
        size_bytes=meta.size,
        modalities=props.modalities,
        adapters=tuple((a.id, a.path, a.scale) for a in adapters),
    )


def canary_tokens(identity: ModelIdentity) -> tuple[TokenIds, TokenIds]:
    """Return the canary's tokens, and the one that is evaluated in another slot."""
    fixed = token_ids(token % max(1, identity.n_vocab) for token in CANARY_TOKENS)
    return fixed[:-1], fixed[-1:]


def static_key(identity: ModelIdentity, layout: Layout) -> str:
    """Return the key under which the namespaces of a model and a cache layout are known."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode([identity, layout]))


# What the index remembers of a model from one process to the next.
#
# Its self-test, tenants, sizes and rates.


def owner_of(store: CheckpointStore, process: Process, tokens: TokenIds) -> Namespace | None:
    """Return the namespace of the tenant whose tokens a slot holds; None if that is not known.

    llama-server does not say. With one tenant there is no question; with several it is the one of whom
    the store has the longest beginning of the same tokens.
    """
    namespaces = [process.tenant_namespace(t) for t in process.tenants or {b""}]
    if len(namespaces) == 1:
        return namespaces[0]
    known = [(max((c.n_common for c in store.find(n, tokens)), default=0), n) for n in namespaces]
    n_common, namespace = max(known)
    return namespace if 2 * n_common >= len(tokens) else None


async def remember_tenant(store: CheckpointStore, process: Process, tenant: bytes) -> None:
    process.tenants.add(tenant)
    await store.put_value(tenants_name(process.model_namespace), sorted(process.tenants))


async def remember_asking(store: CheckpointStore, process: Process) -> None:
    """Remember that llama-server has asked for keys, so that it knew whose this model's states are."""
    name = asking_name(process.model_namespace)
    if process.asks_for_key and not store.index.value(name, bool):
        await store.put_value(name, True)


async def unite_tenants(store: CheckpointStore, process: Process, *, are_all: bool) -> int:
    """Give the states of all tenants of a model to the one that there is now; return how many.

    Unless they *are_all* one by the operator's word, those that came with a key which llama-server has
    asked for stay with that key: who does not ask any more has not said that everybody may see them.
    """
    model = process.model_namespace
    tenants = known_tenants(store.index, model)
    if not tenants or (store.index.value(asking_name(model), bool) and not are_all):
        return 0
    ours = process.tenant_namespace(b"")
    theirs = {tenant_namespace(model, tenant) for tenant in tenants} - {ours}
    moving = [c for c in store if c.namespace in theirs]
    for checkpoint in moving:
        await store.move(checkpoint, ours)
    await store.put_value(tenants_name(model), [])
    return len(moving)


def known_self_test(store: CheckpointStore, process: Process) -> SelfTestResult | None:
    """Return what a self-test of this model on this build has found before.

    One of a server that saved context checkpoints is not that of one which does not: --swa-full and
    --ctx-checkpoints decide that on the same build.
    """
    return store.index.value(_self_test_name_of(process), SelfTestResult)


async def remember_self_test(
    store: CheckpointStore, process: Process, result: SelfTestResult | None
) -> None:
    """Remember what a self-test has found, or with None that nothing is known."""
    await store.put_value(_self_test_name_of(process), result)


def self_test_name(
    model_namespace: Namespace | None, build: str, *, saves_context_checkpoints: bool
) -> str:
    points = "with" if saves_context_checkpoints else "without"
    return f"self-test {(model_namespace or b'').hex()} {points} context checkpoints {build}"


def _self_test_name_of(process: Process) -> str:
    return self_test_name(
        process.model_namespace,
        process.build,
        saves_context_checkpoints=process.saves_context_checkpoints,
    )


def known_sizes(store: CheckpointStore, process: Process) -> list[StateSize]:
    """Return the sizes of the states that the self-test of this model has saved."""
    return store.index.value(_sizes_name(process), list[StateSize]) or []


async def remember_sizes(store: CheckpointStore, process: Process) -> None:
    await store.put_value(_sizes_name(process), list(process.sizes))


def _sizes_name(process: Process) -> str:
    return f"sizes {(process.model_namespace or b'').hex()}"


def known_rates(store: CheckpointStore, process: Process) -> Rates:
    """Return how fast this model on this build was when it was last served here."""
    return store.index.value(_rates_name(process), Rates) or Rates()


async def remember_rates(store: CheckpointStore, process: Process) -> None:
    await store.put_value(_rates_name(process), process.rates)


def _rates_name(process: Process) -> str:
    return f"rates {(process.model_namespace or b'').hex()} {process.build}"
