"""What the tenants of a directory are called: who guesses a key cannot tell it from an export."""

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash

from proxy.core.model import KnownNamespace, keyed_tenant, tenant_namespace
from proxy.core.tokens import Namespace
from proxy.errors import StoreFault
from proxy.health import Faults
from proxy.metrics import Metrics
from proxy.servers import attach
from proxy.serving.tenants import note_tenant
from proxy.store.directory import SECRET_NAME
from proxy.store.known_models import known_namespaces, known_tenants, namespaces_name, tenants_name
from proxy.store.offline import export_checkpoints, import_checkpoints, open_offline, read_records
from proxy.store.store import CheckpointStore
from proxy.tasks import Tasks
from tests.lab.waiting import HANG_SECONDS
from tests.store.conftest import new_state, opened, run_of
from tests.store.test_store import hold_writer
from tests.unit.state_files import attention, state_file, words

MODEL = Namespace(b"m" * 16)
OLD = xxhash.xxh3_128_digest(b"guess-me")
PROMPTS = (run_of(300), run_of(400, start=7))


def nothing(_: int) -> None:
    """Ignore progress."""


async def fill(directory: Path, tenant_of: Callable[[bytes], bytes]) -> None:
    """Leave a store that knows one key, with a state of that key and one of nobody."""
    os.makedirs(directory, exist_ok=True)
    with opened(directory) as store:
        tenant = tenant_of(store.secret)
        await store.put_value(
            namespaces_name("static"), [KnownNamespace(MODEL, [(5, -0.5)], "coder")]
        )
        await store.put_value(tenants_name(MODEL), [tenant])
        for tokens, owner in zip(PROMPTS, (tenant, b""), strict=True):
            content = state_file(words(tokens), attention(len(tokens)))
            namespace = tenant_namespace(MODEL, owner)
            await store.commit(*new_state(store, tokens, content=content, namespace=namespace))


def keyed(secret: bytes) -> bytes:
    return keyed_tenant(secret, OLD)


def model_in(store: CheckpointStore) -> Namespace:
    return Namespace(known_namespaces(store.index, "static")[0].id)


def n_found(store: CheckpointStore) -> tuple[int, int]:
    """Return how many states are found with the key, and how many without any."""
    model = model_in(store)
    own, common = (tenant_namespace(model, tenant) for tenant in (keyed(store.secret), b""))
    return len([*store.find(own, PROMPTS[0])]), len([*store.find(common, PROMPTS[1])])


def test_secret_is_made_with_the_directory_and_stays(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        secret = store.secret
    assert (tmp_path / SECRET_NAME).stat().st_mode & 0o777 == 0o600
    with opened(tmp_path) as store:
        assert store.secret == secret


async def test_secret_that_is_gone_loses_no_state_of_nobody(tmp_path: Path) -> None:
    await fill(tmp_path, keyed)
    (tmp_path / SECRET_NAME).unlink()
    with opened(tmp_path) as store:
        assert n_found(store) == (0, 1) and len(store) == 2


# Exports: they carry what keys are called, not the secret.


async def exported(directory: Path, tmp_path: Path) -> Path:
    file = tmp_path / "file.tar"
    with open_offline(directory) as store:
        export_checkpoints(store.files, read_records(store.files), file, nothing)
    return file


@pytest.mark.parametrize("has_secret", [True, False])
async def test_state_of_a_key_is_entered_only_where_that_key_will_find_it(
    tmp_path: Path, has_secret: bool
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    await fill(first, keyed)
    file = await exported(first, tmp_path)
    secret = (first / SECRET_NAME).read_bytes()
    assert secret not in file.read_bytes() and OLD not in file.read_bytes()
    second.mkdir()
    if has_secret:
        (second / SECRET_NAME).write_bytes(secret)
    with open_offline(second, may_be_new=True) as store:
        if has_secret:
            assert len(import_checkpoints(store, file, nothing).entered) == 2
        else:
            with pytest.raises(StoreFault, match="put key-secret from there"):
                import_checkpoints(store, file, nothing)
    with opened(second) as opened_store:
        assert not has_secret or n_found(opened_store) == (1, 1)


async def test_models_and_tenants_that_are_met_at_the_same_time_are_all_known(
    store: CheckpointStore,
) -> None:
    canaries = [[(5, -0.5)], [(6, -0.5)], [(6, -0.505)]]
    process: Any = SimpleNamespace(store=store)
    tasks = Tasks()
    asyncio.get_running_loop().call_later(0.02, hold_writer(store).set)
    first, *others = await asyncio.gather(
        *(attach._namespace(process, "static", canary, "coder") for canary in canaries)
    )
    assert first not in others and len({*others}) == 1, "the last two are alike"
    known = known_namespaces(store.index, "static")
    assert {Namespace(each.id) for each in known} == {first, *others}

    def meet(tenant: bytes) -> Coroutine[Any, Any, None]:
        here: Any = SimpleNamespace(
            tier=None,
            tenants=set(),
            is_one_tenant=False,
            has_ram_cache=False,
            can_cache=True,
            model_namespace=MODEL,
            store=store,
            faults=Faults(Metrics()),
            tenant_here=lambda tenant: tenant,
            tasks=tasks,
        )
        request: Any = SimpleNamespace(tenant=tenant)
        return note_tenant(here, request)

    asyncio.get_running_loop().call_later(0.02, hold_writer(store).set)
    await asyncio.gather(meet(b"ann"), meet(b"bob"))
    await tasks.drain(HANG_SECONDS)
    assert known_tenants(store.index, MODEL) == {b"ann", b"bob"}
