"""What promtool says of the files in deploy/prometheus."""

from tests.documents.files import REPOSITORY
from tests.lab.prometheus import promtool

FOLDER = REPOSITORY / "deploy" / "prometheus"


def test_configuration_and_alerts_are_valid() -> None:
    assert "SUCCESS" in promtool("check", "config", FOLDER / "prometheus.yml")
    assert "SUCCESS" in promtool("check", "rules", FOLDER / "alerts.yml")


def test_alerts_fire_when_they_should_and_only_then() -> None:
    assert "SUCCESS" in promtool("test", "rules", FOLDER / "alerts.test.yml")
