"""Which documents hold something generated, and where in them it stands.

A document says `<!-- generated: NAME -->` where a table begins and `<!-- end -->` where it ends; what
stands outside is written by hand.
"""

import re
from collections.abc import Callable
from pathlib import Path

from tests.documents.dashboard.grafana import dashboard_file
from tests.documents.dashboard.tables import alerts_table
from tests.documents.settings import example_file, settings_table
from tests.documents.sizes import sizes_table
from tests.documents.tables import causes_list, degradations_table, metrics_table, stabilizers_table
from tests.integration.fault_matrix import table as faults_table

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "deploy" / "config.example.yaml"
DASHBOARD = REPOSITORY / "deploy" / "grafana" / "dashboards" / "llama-prefix-cache.json"
TABLES: dict[str, Callable[[], str]] = {
    "settings": settings_table,
    "metrics": metrics_table,
    "causes": causes_list,
    "degradations": degradations_table,
    "stabilizers": stabilizers_table,
    "alerts": alerts_table,
    "faults": faults_table,
    "sizes": sizes_table,
}
_PLACE = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def generated_files() -> dict[Path, str]:
    """Return what every document with something generated in it should be."""
    files = {EXAMPLE: example_file(), DASHBOARD: dashboard_file()}
    for path in sorted((REPOSITORY / "docs").glob("*.md")):
        text = path.read_text()
        if _PLACE.search(text):
            files[path] = fill(text)
    return files


def fill(text: str) -> str:
    """Return a document with its tables as they should be; raises KeyError for an unknown one."""
    return _PLACE.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n{m[3]}", text)
