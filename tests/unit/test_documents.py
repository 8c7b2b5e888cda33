"""What is generated in the documents is what the code says now; `make docs` writes it."""

import re
from pathlib import Path

import pytest

from proxy.config import NAMES
from proxy.core.degradation import DegradationKind
from proxy.metrics import Metrics
from tests.documents.files import REPOSITORY, TABLES, generated_files
from tests.documents.settings import all_settings

DOCS = REPOSITORY / "docs"
LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("path", generated_files(), ids=lambda path: path.name)
def test_generated_parts_are_up_to_date(path: Path) -> None:
    assert path.read_text() == generated_files()[path], "run `make docs`"


def test_each_table_stands_somewhere() -> None:
    text = "".join(path.read_text() for path in DOCS.glob("*.md"))
    assert set(re.findall(r"<!-- generated: (\w+) -->", text)) == set(TABLES)


def test_configuration_names_every_setting() -> None:
    text = (DOCS / "configuration.md").read_text()
    assert [name for name in NAMES if f"`{name}`" not in text] == []


def test_operations_name_every_degradation() -> None:
    text = (DOCS / "operations.md").read_text()
    assert [kind for kind in DegradationKind if f"| {kind} |" not in text] == []


def test_metrics_that_documents_and_code_name_are_the_same() -> None:
    names = {family.name for family in Metrics().families}
    assert set(re.findall(r"^\| `(\w+)`", (DOCS / "metrics.md").read_text(), re.M)) == names
    suffixes = r"(?:_bucket|_sum|_count)?"
    told = set[str]()
    for path in DOCS.glob("*.md"):
        told |= set(re.findall(r"\b(llama_prefix_cache_\w+)", path.read_text()))
    assert {name for name in told if re.sub(suffixes + "$", "", name) not in names} == set()


def test_every_setting_is_described_in_whole_sentences() -> None:
    assert [s.name for s in all_settings() if not s.words.endswith(".")] == []


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    missing = [link for link in LINK.findall(path.read_text()) if not (path.parent / link).exists()]
    assert missing == []
