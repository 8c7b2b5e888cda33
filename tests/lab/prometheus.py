"""A real Prometheus and its promtool: asks what panels and alerts would, of whatever it has scraped."""

import json
import math
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml

from tests.lab.server import REPOSITORY, find_free_port, request

FETCHED = REPOSITORY / ".lab" / "prometheus"
START_SECONDS = 300.0
STOP_SECONDS = 60.0
POLL_SECONDS = 0.05


def find_program(name: str) -> Path:
    """Return `prometheus` or `promtool`: that on PATH, or the fetched one."""
    program = Path(shutil.which(name) or FETCHED / name)
    assert os.access(program, os.X_OK), f"no {name}: run tests/lab/fetch_prometheus.sh {FETCHED}"
    return program


def promtool(*arguments: str | Path, stdin: bytes = b"") -> str:
    """Run promtool; its output is returned, and part of the complaint if it refuses."""
    done = subprocess.run([find_program("promtool"), *arguments], input=stdin, capture_output=True)
    output = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, output
    return output


class Prometheus:
    """One Prometheus by a configuration of deploy/, but for its targets and how often it asks them."""

    def __init__(self, config: Path, directory: Path, targets: list[str]) -> None:
        self.port = find_free_port()
        self._directory = directory
        self._config = directory / "prometheus.yml"
        self._config.write_text(_hurried(config, targets))

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [str(find_program("prometheus")), f"--config.file={self._config}"]
        command += [f"--storage.tsdb.path={self._directory / 'data'}", "--log.level=warn"]
        command += [f"--web.listen-address=127.0.0.1:{self.port}"]
        with (self._directory / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def instant(self, expr: str, at: float | None = None) -> dict[str, float]:
        """Return the value of each series, by its labels, at a time (now)."""
        data = self.ask("query", query=expr, time=time.time() if at is None else at)
        if data["resultType"] == "scalar":
            return {"": float(data["result"][1])}
        return {_name(s["metric"]): float(s["value"][1]) for s in data["result"]}

    def over(self, expr: str, start: float, end: float) -> dict[str, list[float]]:
        """Return what a graph would draw of each series: its values that are numbers."""
        data = self.ask("query_range", query=expr, start=start, end=end, step=0.5)
        drawn = {
            _name(s["metric"]): [float(value) for _, value in s["values"]] for s in data["result"]
        }
        return {name: [v for v in values if not math.isnan(v)] for name, values in drawn.items()}

    def ask(self, what: str, **parameters: object) -> Any:
        """Return the data of an answer of /api/v1."""
        path = f"/api/v1/{what}?{urlencode(parameters)}"
        status, answer = request(self.base_url, "GET", path)
        assert status == 200, (parameters, answer)
        return answer["data"]

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._is_ready():
            log = (self._directory / "prometheus.log").read_text()
            assert self._process.poll() is None and time.monotonic() < deadline, log
            time.sleep(POLL_SECONDS)

    def _is_ready(self) -> bool:
        try:
            return request(self.base_url, "GET", "/-/ready", timeout_seconds=2.0)[0] == 200
        except OSError:
            return False


def _hurried(config: Path, targets: list[str]) -> str:
    """Return a configuration that scrapes *targets* every second."""
    settings = yaml.safe_load(config.read_text())
    settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    settings["rule_files"] = [str(config.parent / name) for name in settings["rule_files"]]
    (job,) = settings["scrape_configs"]
    job["static_configs"] = [{"targets": targets}]
    return yaml.safe_dump(settings)


def _name(labels: dict[str, str]) -> str:
    return json.dumps(labels, sort_keys=True)
