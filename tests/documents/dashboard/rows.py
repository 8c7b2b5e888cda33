"""The whole dashboard: did it hit, what did it save, and if not, why not?

`make docs` writes deploy/grafana/dashboards/llama-prefix-cache.json from here;
tests/live/test_dashboard.py runs every query on a real Prometheus.
"""

from tests.documents.dashboard.benefit import AT_A_GLANCE, MISSES, REUSE, TIME
from tests.documents.dashboard.condition import LEARNED, TROUBLE
from tests.documents.dashboard.resources import SHARED, SLOTS, STORE

ROWS = (AT_A_GLANCE, REUSE, MISSES, TIME, SLOTS, STORE, SHARED, TROUBLE, LEARNED)
