"""What a host of models tells of the command lines it starts them with; nothing is loaded for it.

llama-server's router tells all of them (GET /models, status.args), without what it hands on by
environment variables; llama-swap those of the models that run (GET /running).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from proxy.upstream.hosts.model_host import ModelHost

_SAVE_PATH = ("--slot-save-path",)
_SLEEP = ("--sleep-idle-seconds",)


@dataclass(frozen=True, slots=True)
class HostedFlags:
    """What decides over a model's states; None or 0 if its command line does not say.

    `unload_seconds` and `sleep_seconds` are the idle times after which its slots are gone.
    """

    model: str
    slot_save_path: str | None = None
    unload_seconds: float = 0.0
    sleep_seconds: float = 0.0


async def hosted_flags(host: ModelHost) -> list[HostedFlags]:
    """Return what is told of each model; raises UpstreamFault."""
    lines = await host.command_lines()
    return [read_flags(line.model, line.words, line.unload_seconds) for line in lines]


def read_flags(model: str, words: Sequence[str], unload_seconds: float = 0.0) -> HostedFlags:
    """Return what a command line says; llama-server may be anywhere in it, behind docker or a shell."""
    return HostedFlags(
        model,
        _value(words, _SAVE_PATH),
        max(0.0, unload_seconds),
        _seconds(_value(words, _SLEEP)),
    )


def _value(words: Sequence[str], names: Sequence[str]) -> str | None:
    # The last one counts; --slot_save_path is the same to llama-server.
    found = [value for name, value in pairwise(words) if name.replace("_", "-") in names]
    return found[-1] if found else None


def _seconds(text: str | None) -> float:
    try:
        return max(0.0, float(text or 0))
    except ValueError:
        return 0.0
