"""The import rules of the layers, and the limits on the size of functions and modules."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PROXY = Path(__file__).parents[2] / "proxy"
MODULES = {
    ".".join(path.relative_to(PROXY.parent).with_suffix("").parts): ast.parse(path.read_text())
    for path in sorted(PROXY.rglob("*.py"))
    if path.name != "__init__.py"
}
MAY_IMPORT = {
    "proxy.core": {"proxy.core"},
    "proxy.store": {"proxy.core", "proxy.errors", "proxy.store"},
    "proxy.upstream": {"proxy.core", "proxy.errors", "proxy.upstream"},
    "proxy.driver": {"proxy.core", "proxy.store", "proxy.upstream", "proxy.errors"}
    | {"proxy.metrics", "proxy.log", "proxy.driver", "proxy.stabilize"},
    "proxy.front": {"proxy.driver", "proxy.core", "proxy.upstream", "proxy.errors"}
    | {"proxy.metrics", "proxy.log", "proxy.front", "proxy.stabilize"},
    "proxy.doctor": {"proxy.core", "proxy.store", "proxy.upstream", "proxy.driver"}
    | {"proxy.addresses", "proxy.errors", "proxy.doctor"},
    "proxy.offline": {"proxy.core", "proxy.store", "proxy.errors", "proxy.offline"}
    | {"proxy.driver.contact.known_models"},
    "proxy.offline.models": {"proxy.driver.contact.identity"},
    "proxy.offline.checking": {"proxy.upstream.state_file"},
    "proxy.offline.importing": {"proxy.upstream.state_file"},
    "proxy.front.stored": {"proxy.store"},
    "proxy.page": {"proxy.core", "proxy.driver", "proxy.front", "proxy.store", "proxy.page"},
    "proxy.complaints": {"proxy.errors"},
    "proxy.config": {"proxy.addresses", "proxy.stabilize.names"},
    "proxy.loading": {
        "proxy.complaints",
        "proxy.config",
        "proxy.errors",
        "proxy.sizes",
        "proxy.sources",
    },
    "proxy.addresses": set(),
    "proxy.stabilize": {"proxy.stabilize"},
    "proxy.sizes": {"proxy.errors"},
    "proxy.sources": {"proxy.errors"},
    "proxy.errors": set(),
    "proxy.metrics": {"proxy.core", "proxy.metric_registry", "proxy.stabilize.names"},
    "proxy.metric_registry": set(),
    "proxy.log": set(),
    "proxy.version": {"proxy.__version__", "proxy.store.index", "proxy.upstream.state_file"},
    "proxy.run": {"proxy.core", "proxy.errors", "proxy.log", "proxy.run"},
    "proxy.run.guard": set(),
    "proxy.app": {"proxy"},
    "proxy.building": {"proxy.config", "proxy.driver", "proxy.stabilize", "proxy.upstream"},
    "proxy.commands": {"proxy.commands", "proxy.app", "proxy.config", "proxy.core", "proxy.errors"}
    | {"proxy.addresses", "proxy.log", "proxy.run", "proxy.sizes", "proxy.upstream"}
    | {"proxy.loading", "proxy.offline"},
    "proxy.commands.options": {"proxy.sources"},
    "proxy.commands.doctor": {"proxy.doctor", "proxy.driver", "proxy.store"},
    "proxy.commands.bench": {"proxy.doctor"},
    "proxy.__main__": {"proxy"},
}
CORE_PACKAGES = (sys.stdlib_module_names | {"xxhash", "msgspec", "proxy"}) - {
    *("asyncio", "datetime", "io", "logging", "os", "pathlib", "random", "socket", "time")
}


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
    """Whether a module only decides: core, stabilizers, and the judgement of doctor's facts."""
    judges = lies_in(name, "proxy.doctor") and name.endswith(("facts", "findings", "verdict"))
    return judges or any(lies_in(name, layer) for layer in ("proxy.core", "proxy.stabilize"))


@pytest.mark.parametrize("name", MODULES)
def test_imports_of_a_module_stay_in_its_layer(name: str) -> None:
    layers = [layer for layer in MAY_IMPORT if lies_in(name, layer)]
    allowed = set[str]().union(*(MAY_IMPORT[layer] for layer in layers))
    assert layers, f"{name} is in no known layer"
    ours = [imported for imported in imports(MODULES[name]) if lies_in(imported, "proxy")]
    assert [i for i in ours if not any(lies_in(i, package) for package in allowed)] == []


@pytest.mark.parametrize("name", [name for name in MODULES if is_pure(name)])
def test_pure_module_neither_waits_nor_opens_nor_reads_a_clock(name: str) -> None:
    assert {imported.split(".")[0] for imported in imports(MODULES[name])} <= CORE_PACKAGES
    waiting = (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)
    assert not [node for node in ast.walk(MODULES[name]) if isinstance(node, waiting)]
    called = {ast.unparse(n.func) for n in ast.walk(MODULES[name]) if isinstance(n, ast.Call)}
    assert not called & {"open", "print", "input", "eval", "exec"}


def test_guard_needs_nothing_but_the_standard_library() -> None:
    assert set(imports(MODULES["proxy.run.guard"])) <= sys.stdlib_module_names


@pytest.mark.parametrize("name", MODULES)
def test_size_of_module_and_its_functions_stays_within_the_limit(name: str) -> None:
    functions = (
        node
        for node in ast.walk(MODULES[name])
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    too_long = [f.name for f in functions if (f.end_lineno or 0) - f.lineno + 1 > 60]
    n_lines = len((PROXY.parent / (name.replace(".", "/") + ".py")).read_text().splitlines())
    assert not too_long
    assert n_lines <= 300
