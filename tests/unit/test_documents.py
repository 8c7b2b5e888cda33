"""What is generated in the documents is what the code says now; `make docs` writes it."""

import re
from pathlib import Path
from typing import Any

import pytest

from proxy.core.conditions import DegradationKind
from proxy.settings import NAMES
from tests.documents.blocks import PAGES
from tests.documents.files import REPOSITORY, TABLES, generated_files
from tests.documents.settings import words
from tests.documents.sizes import Configuration
from tests.lab.samples import families

DOCS = REPOSITORY / "docs"
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")


@pytest.mark.parametrize("path", generated_files(), ids=lambda path: path.name)
def test_generated_parts_are_up_to_date(path: Path) -> None:
    assert path.read_text() == generated_files()[path], "run `make docs`"


def test_each_table_stands_somewhere() -> None:
    text = "".join(path.read_text() for path in DOCS.glob("*.md"))
    assert set(re.findall(r"<!-- generated: (\w+) -->", text)) == set(TABLES)


def test_configuration_names_every_setting() -> None:
    text = (DOCS / "configuration.md").read_text()
    assert [name for name in NAMES if f"`{name}`" not in text] == []


def test_monitoring_names_every_degradation() -> None:
    text = (DOCS / "monitoring.md").read_text()
    assert [kind for kind in DegradationKind if f"| {kind} |" not in text] == []


def test_metrics_that_documents_and_code_name_are_the_same() -> None:
    names = {family.name for family in families()}
    assert set(re.findall(r"^\| `(\w+)", (DOCS / "metrics.md").read_text(), re.M)) == names
    suffixes = r"(?:_bucket|_sum|_count)?"
    told = set[str]()
    for path in DOCS.glob("*.md"):
        told |= set(re.findall(r"\b(llama_prefix_cache_\w+)", path.read_text()))
    assert {name for name in told if re.sub(suffixes + "$", "", name) not in names} == set()


def test_every_setting_is_described_in_whole_sentences() -> None:
    assert [name for name in NAMES if not words(name).endswith(".")] == []


def test_readme_leads_to_every_page() -> None:
    linked = set(re.findall(r"\]\(docs/([\w-]+\.md)", (REPOSITORY / "README.md").read_text()))
    assert {path.name for path in DOCS.glob("*.md")} - linked == set()


def test_sizes_by_the_formula_are_those_measured_with_the_models_of_the_lab() -> None:
    def of_tiny(full_layers: int, **more: Any) -> Configuration:
        return Configuration("tiny", kv_heads=1, head_size=32, full_layers=full_layers, **more)

    assert of_tiny(4).token_bytes == 528
    window = of_tiny(2, window_layers=2, window=512)
    assert (window.token_bytes, round(window.fixed_bytes, -3)) == (272, 137_000)
    delta_nets = {"recurrent_layers": 3, "value_heads": 2, "key_heads": 2}
    hybrid = of_tiny(1, **delta_nets, recurrent_head_size=32, has_mrope=True)
    assert (hybrid.token_bytes, round(hybrid.fixed_bytes, -3)) == (156, 31_000)
    assert round(hybrid.state_bytes(10_000, 2), -5) == 1_700_000


def headings(page: Path) -> list[str]:
    """Return the headings of a page as GitHub names them in addresses."""
    found = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for link, heading in LINK.findall(path.read_text()):
        target = path.parent / link if link else path
        assert target.exists()
        assert not heading or heading in headings(target), f"{link}#{heading}"
