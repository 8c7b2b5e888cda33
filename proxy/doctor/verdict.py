"""A finding, and what all findings together come to.

Owns: the three severities and with them the exit status.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum


class Severity(IntEnum):
    """How bad a finding is; the worst one is the exit status."""

    OK = 0
    LIMIT = 1
    BLOCKER = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: what it is, what that means, and the flag or step that mends it.

    `about` says which llama-server, model or host it is about, where there are several.
    """

    topic: str
    severity: Severity
    text: str
    cure: str = ""
    about: str = ""


def ok(topic: str, text: str) -> Finding:
    return Finding(topic, Severity.OK, text)


def limit(topic: str, text: str, cure: str) -> Finding:
    return Finding(topic, Severity.LIMIT, text, cure)


def blocker(topic: str, text: str, cure: str) -> Finding:
    return Finding(topic, Severity.BLOCKER, text, cure)


def exit_status(findings: Iterable[Finding]) -> int:
    """Return 0 if caching will work, 1 if it will with limits, 2 if it will not."""
    return int(max((finding.severity for finding in findings), default=Severity.OK))


def summary(findings: Iterable[Finding], *, is_complete: bool) -> str:
    """Return the verdict in a sentence; without *is_complete* no good one is given."""
    match exit_status(findings):
        case Severity.BLOCKER:
            return "Caching will not work."
        case _ if not is_complete:
            return "Nothing speaks against caching so far, but not everything could be examined."
        case Severity.LIMIT:
            return "Caching will work, with limits."
        case _:
            return "Caching will work."
