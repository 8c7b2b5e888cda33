"""The import rules of the layers, and the limit on the size of functions."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PROXY = Path(__file__).parents[2] / "proxy"
MODULES = {
    ".".join(path.relative_to(PROXY.parent).with_suffix("").parts): path
    for path in sorted(PROXY.rglob("*.py"))
    if path.name != "__init__.py"
}
_SERVES = {"proxy.core", "proxy.explain", "proxy.llama", "proxy.stabilize", "proxy.store"} | {
    *("proxy.errors", "proxy.health", "proxy.log", "proxy.metrics", "proxy.tasks")
}
MAY_IMPORT = {
    "proxy.core": {"proxy.core"},
    "proxy.stabilize": {"proxy.core.messages", "proxy.core.tokens"}
    | {"proxy.errors", "proxy.stabilize"},
    "proxy.stabilize.drops": {"proxy.llama.conversions"},
    "proxy.explain": {"proxy.core", "proxy.explain"},
    "proxy.explain.judgement": {"proxy.llama.client"},
    "proxy.explain.report": {
        "proxy.errors",
        "proxy.llama",
        "proxy.log",
        "proxy.metrics",
        "proxy.serving",
        "proxy.servers",
        "proxy.store",
    },
    "proxy.llama": {"proxy.core", "proxy.errors", "proxy.llama"},
    "proxy.store": {"proxy.core", "proxy.errors", "proxy.store"},
    "proxy.store.directory": {"proxy.llama.files"},
    "proxy.store.offline": {"proxy.llama.files"},
    "proxy.shared": {"proxy.core", "proxy.errors", "proxy.health", "proxy.llama.files"}
    | {"proxy.log", "proxy.metrics", "proxy.shared", "proxy.store", "proxy.tasks"},
    "proxy.serving": _SERVES | {"proxy.serving"},
    "proxy.serving.fetching": {"proxy.shared"},
    "proxy.serving.services": {"proxy.shared"},
    "proxy.servers": _SERVES | {"proxy.servers", "proxy.serving", "proxy.settings"},
    "proxy.web": _SERVES | {"proxy.__version__", "proxy.servers", "proxy.serving", "proxy.web"},
    "proxy.doctor": _SERVES | {"proxy.doctor", "proxy.servers", "proxy.serving", "proxy.settings"},
    "proxy.run": {"proxy.core", "proxy.errors", "proxy.log", "proxy.run"},
    "proxy.run.guard": set(),
    "proxy.cli": {"proxy.app", "proxy.cli", "proxy.core", "proxy.errors", "proxy.explain"}
    | {"proxy.llama", "proxy.log", "proxy.run", "proxy.settings", "proxy.store"},
    "proxy.cli.look": {"proxy.shared", "proxy.doctor", "proxy.servers", "proxy.serving"},
    "proxy.settings": {"proxy.core.conditions", "proxy.core.rates", "proxy.core.sharing"}
    | {"proxy.errors", "proxy.stabilize.model"},
    "proxy.errors": set(),
    "proxy.log": set(),
    "proxy.tasks": {"proxy.errors"},
    "proxy.metrics": {"proxy.core", "proxy.explain.causes"} | {"proxy.stabilize.model"},
    "proxy.health": {"proxy.core", "proxy.errors", "proxy.log", "proxy.metrics"},
    "proxy.app": {"proxy"},
    "proxy.__main__": {"proxy"},
}
CORE_PACKAGES = (sys.stdlib_module_names | {"cachetools", "xxhash", "msgspec", "proxy"}) - {
    *("asyncio", "datetime", "io", "logging", "os", "pathlib", "random", "socket", "time")
}


@cache
def parsed(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text())


def imports(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            # `from proxy import x` may name a module, so the name counts as part of the path.
            names = [alias.name for alias in node.names] if node.module == "proxy" else [""]
            yield from (f"{node.module}.{name}".rstrip(".") for name in names)


def lies_in(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def is_pure(name: str) -> bool:
    """Whether a module only decides: core, stabilizers, explanations, doctor's findings."""
    if lies_in(name, "proxy.explain"):
        return name != "proxy.explain.report"
    return name == "proxy.doctor.findings" or any(
        lies_in(name, layer) for layer in ("proxy.core", "proxy.stabilize")
    )


@pytest.mark.parametrize("name", MODULES)
def test_imports_of_a_module_stay_in_its_layer(name: str) -> None:
    layers = [layer for layer in MAY_IMPORT if lies_in(name, layer)]
    allowed = set[str]().union(*(MAY_IMPORT[layer] for layer in layers))
    assert layers, f"{name} is in no known layer"
    ours = [imported for imported in imports(parsed(name)) if lies_in(imported, "proxy")]
    assert [i for i in ours if not any(lies_in(i, package) for package in allowed)] == []


@pytest.mark.parametrize("name", [name for name in MODULES if is_pure(name)])
def test_pure_module_neither_waits_nor_opens_nor_reads_a_clock(name: str) -> None:
    assert {imported.split(".")[0] for imported in imports(parsed(name))} <= CORE_PACKAGES
    waiting = (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)
    assert not [node for node in ast.walk(parsed(name)) if isinstance(node, waiting)]
    called = {ast.unparse(n.func) for n in ast.walk(parsed(name)) if isinstance(n, ast.Call)}
    assert not called & {"open", "print", "input", "eval", "exec"}


def test_shared_store_is_not_loaded_unless_it_is_set() -> None:
    names = ("proxy.shared", "obstore", "cryptography")
    says = f"import sys, proxy.app; print([m for m in sys.modules if m.startswith({names})])"
    told = subprocess.run([sys.executable, "-c", says], capture_output=True, text=True, check=True)
    assert told.stdout == "[]\n"


def test_guard_needs_nothing_but_the_standard_library() -> None:
    assert set(imports(parsed("proxy.run.guard"))) <= sys.stdlib_module_names


@pytest.mark.parametrize("name", MODULES)
def test_function_has_at_most_60_lines(name: str) -> None:
    functions = (
        node
        for node in ast.walk(parsed(name))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    assert not [f.name for f in functions if (f.end_lineno or 0) - f.lineno + 1 > 60]
