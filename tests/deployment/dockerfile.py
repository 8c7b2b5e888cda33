"""Reads deploy/Dockerfile into the stages that a build goes through.

Knows the instructions that ours uses, in the forms that it uses them in; another one is an error, not
something to pass over.
"""

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dockerfile_parse import DockerfileParser

_FIELDS = {
    "WORKDIR": "folder",
    "USER": "user",
    "STOPSIGNAL": "stop_signal",
    "ENTRYPOINT": "entrypoint",
    "CMD": "command",
}
_VARIABLE = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Run:
    """A command line for the shell, with the folder and the environment that it runs in."""

    command: str
    folder: str
    environment: dict[str, str]


@dataclass(frozen=True, slots=True)
class Copy:
    """Files from the repository, or from the stage *source*, to a path in the image."""

    source: str | None
    names: tuple[str, ...]
    target: str


@dataclass(slots=True)
class Stage:
    """One FROM with what follows it; steps in order, the rest as it stands at the end."""

    base: str
    name: str | None
    steps: list[Run | Copy] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    health: list[str] = field(default_factory=list)
    stop_signal: str = "SIGTERM"

    def apply(self, instruction: str, value: str) -> None:
        """Take in one instruction; raises ValueError for one that is not known here."""
        match instruction:
            case "RUN":
                # The shell substitutes what it finds in its environment.
                self.steps.append(Run(value, self.folder, {**self.arguments, **self.environment}))
            case "COPY":
                self.steps.append(_read_copy(self._fill(value), self.folder))
            case "ENV":
                pairs = (pair.partition("=") for pair in shlex.split(self._fill(value)))
                self.environment |= {name: text for name, _, text in pairs}
            case "LABEL":
                pairs = (pair.partition("=") for pair in shlex.split(self._fill(value)))
                self.labels |= {name: text for name, _, text in pairs}
            case "ARG":
                name, _, text = value.partition("=")
                self.arguments[name] = text
            case "WORKDIR" | "USER" | "STOPSIGNAL":
                setattr(self, _FIELDS[instruction], self._fill(value))
            case "ENTRYPOINT" | "CMD":
                setattr(self, _FIELDS[instruction], json.loads(value))
            case "HEALTHCHECK":
                self.health = json.loads(value.partition("CMD ")[2])
            case "EXPOSE" | "COMMENT":
                pass
            case _:
                raise ValueError(f"{instruction} {value}")

    def _fill(self, value: str) -> str:
        known = {**self.arguments, **self.environment}
        return _VARIABLE.sub(lambda found: known[found[1]], value)


def _read_copy(value: str, folder: str) -> Copy:
    words = shlex.split(value)
    source = words.pop(0).removeprefix("--from=") if words[0].startswith("--from=") else None
    *names, target = words
    return Copy(source, tuple(names), str(Path(folder, target)))


def read_dockerfile(path: Path) -> list[Stage]:
    """Return the stages of a Dockerfile; the last one is the image."""
    with path.open("rb") as file:
        structure: list[dict[str, Any]] = DockerfileParser(fileobj=file).structure
    stages: list[Stage] = []
    for found in structure:
        if found["instruction"] == "FROM":
            base, _, name = found["value"].partition(" AS ")
            stages.append(Stage(base, name or None))
        elif stages:
            stages[-1].apply(found["instruction"], found["value"])
    return stages
