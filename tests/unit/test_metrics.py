"""Metrics: named by the conventions, all series there from the start, no label value unforeseen."""

import ast
import re

import pytest

from proxy.metrics import PREFIX, STAGES, Metrics
from tests.lab.samples import Family, families
from tests.unit.test_layers import MODULES, parsed

FAMILIES = families()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_metric_follows_the_conventions_of_prometheus(family: Family) -> None:
    assert re.fullmatch(rf"{PREFIX}(_[a-z]+)+", family.name)
    assert family.name.endswith("_total") == (family.type == "counter")
    assert not re.search(
        r"_(count|sum|bucket|ms|millis|milliseconds|kb|mb|percent)(_|$)", family.name
    )
    if family.type == "histogram":
        assert family.name.endswith("_seconds")
    assert family.help.endswith(".") and not re.search(r"[\n|]", family.help)


def test_families_are_all_that_is_registered() -> None:
    named = {family.name.removesuffix("_total") for family in FAMILIES}
    assert named == {family.name for family in Metrics().registry.collect()}


def test_every_labelled_series_is_there_before_anything_happens() -> None:
    exposition = Metrics().exposition().decode()
    assert f'{PREFIX}_requests_total{{outcome="hit"}} 0.0' in exposition
    assert f'{PREFIX}_degraded{{kind="saves fail"}} 0.0' in exposition
    assert f'{PREFIX}_rule{{rule="end only"}} 0.0' in exposition


def labelled_calls() -> list[tuple[str, str, str]]:
    """Return module, metric and value of every `metrics.<metric>.labels("value")` in the code."""
    found = []
    for name in MODULES:
        for node in ast.walk(parsed(name)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "labels"
                and isinstance(node.func.value, ast.Attribute)
            ):
                values = [a.value for a in node.args if isinstance(a, ast.Constant)]
                found += [(name, node.func.value.attr, str(value)) for value in values]
    return found


def test_label_values_in_the_code_are_all_declared() -> None:
    declared = {
        family.name.removeprefix(f"{PREFIX}_").removesuffix("_total"): family.labels
        for family in FAMILIES
    }
    calls = labelled_calls()
    assert len(calls) > 5
    for name, metric, value in calls:
        assert value in [v for values in declared[metric].values() for v in values], (name, value)


def test_stages_of_faults_in_the_code_are_all_declared() -> None:
    stages = {
        node.args[0].value
        for name in MODULES
        for node in ast.walk(parsed(name))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("record", "suppressed", "count")
        and ast.unparse(node.func.value).endswith("faults")
        and isinstance(node.args[0], ast.Constant)
    }
    assert stages == set(STAGES)
