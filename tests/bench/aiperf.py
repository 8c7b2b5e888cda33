"""NVIDIA's load generator aiperf, unmodified: how it is called without a network, and what it reports.

Owns: the folder of its reports, which are kept as aiperf writes them, and the tokenizer that it makes its
prompts with, which is that of the lab models. aiperf finds a tokenizer only where Hugging Face's own
downloads would lie. Knows nothing of llama-server and the proxy.
"""

import asyncio
import json
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from tests.lab.server import REPOSITORY
from tests.lab.vocabulary import (
    END_OF_TEXT,
    PRE_TOKENIZER_PATTERN,
    SPECIAL_TOKENS,
    train_vocabulary,
)

PROGRAM = REPOSITORY / ".lab" / "load-tools" / "bin" / "aiperf"
RUN_SECONDS = 600.0
SEED = 7
N_ANSWER_TOKENS = 16
_TOKENIZER, _REVISION = "lab/tokenizer", "0" * 40
_REPORT = "profile_export_aiperf.json"
_BLOCK_TOKENS = 64


class AiperfError(Exception):
    """aiperf failed, or requests did."""


@dataclass(frozen=True, slots=True)
class Load:
    """So many conversations of so many turns, all at the same time.

    aiperf's own lengths are divided by `divisor`, where they are agentic.
    """

    n_conversations: int
    n_turns: int
    is_agentic: bool = True
    divisor: int = 8


@dataclass(frozen=True, slots=True)
class Report:
    """What aiperf says of one run: milliseconds to the first token."""

    p50: float
    p95: float
    n_requests: int


class Aiperf:
    """Runs aiperf with one folder for all its files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()

    async def profile(self, url: str, load: Load, name: str) -> Report:
        """Send a load to *url* and return what aiperf reports; its files stay in the folder *name*."""
        artifacts = self._folder / name
        artifacts.mkdir(parents=True, exist_ok=True)
        dataset = await self._agentic_code(load) if load.is_agentic else _multi_turn(load)
        await self._call(
            *("profile", "-m", "lab", "--url", url, "--endpoint-type", "chat", "--streaming"),
            *("--tokenizer", _TOKENIZER, "--use-server-token-count", "--no-gpu-telemetry"),
            *("--extra-inputs", "temperature:0", "--extra-inputs", "seed:1"),
            *("--random-seed", str(SEED), "--ui", "none", "--artifact-dir", str(artifacts)),
            *(
                "--connection-reuse-strategy",
                "never",
            ),  # llama-server closes idle ones as they are used
            *("--concurrency", str(load.n_conversations), *dataset),
            log=artifacts / "stdout.log",
        )
        return self.report(name)

    async def _agentic_code(self, load: Load) -> list[str]:
        """Return the arguments for sessions as `aiperf synthesize agentic-code` makes them."""
        name = f"agentic-{load.n_conversations}x{load.n_turns}-{load.divisor}"
        made = self._folder / name
        if not list(made.glob("*/dataset.jsonl")):
            made.mkdir(parents=True, exist_ok=True)
            config = made / "config.json"
            config.write_text(json.dumps(_agentic_config(load)))
            number = ["--num-sessions", str(load.n_conversations), "--seed", str(SEED)]
            synthesize = ["synthesize", "agentic-code", "--config", str(config), *number]
            await self._call(*synthesize, "--output", str(made), log=made / "synthesize.log")
        [dataset] = made.glob("*/dataset.jsonl")
        return [
            *("--input-file", str(dataset), "--custom-dataset-type", "mooncake-trace"),
            *("--isl-block-size", str(_BLOCK_TOKENS), "--no-fixed-schedule"),
            *("--request-count", str(load.n_conversations * load.n_turns)),
        ]

    def report(self, name: str) -> Report:
        """Return what aiperf has reported in the folder *name*; raises AiperfError, FileNotFoundError."""
        said = json.loads((self._folder / name / _REPORT).read_text())
        if said["error_summary"] or said["was_cancelled"]:
            raise AiperfError(f"{name}: {said['error_summary']}")
        first_token = said["time_to_first_token"]
        return Report(first_token["p50"], first_token["p95"], int(first_token["count"]))

    async def _call(self, *arguments: str, log: Path) -> None:
        environment = {**os.environ, "HF_HOME": str(self._home), "HF_HUB_OFFLINE": "1"}
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                PROGRAM,
                *arguments,
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                status = await asyncio.wait_for(process.wait(), RUN_SECONDS)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # of aiperf's workers, if any is left
        if status:
            raise AiperfError(f"aiperf {arguments[0]} ended with {status}, see {log}")

    @cached_property
    def _home(self) -> Path:
        """Return a Hugging Face home that holds the tokenizer."""
        home = self._folder / "hugging-face"
        model = home / "hub" / f"models--{_TOKENIZER.replace('/', '--')}"
        snapshot = model / "snapshots" / _REVISION
        if not snapshot.exists():
            save_tokenizer(snapshot)
            (model / "refs").mkdir()
            (model / "refs" / "main").write_text(_REVISION)
        return home


def _multi_turn(load: Load) -> list[str]:
    """Return the arguments for aiperf's own conversations behind a system prompt that they share."""
    return [
        *("--conversation-num", str(load.n_conversations)),
        *("--num-dataset-entries", str(load.n_conversations)),
        *("--conversation-turn-mean", str(load.n_turns)),
        *("--conversation-turn-delay-mean", "1000", "--conversation-turn-delay-stddev", "500"),
        *("--shared-system-prompt-length", "4000", "--user-context-prompt-length", "1875"),
        *("--isl", "750", "--isl-stddev", "250", "--osl", str(N_ANSWER_TOKENS)),
    ]


def _agentic_config(load: Load) -> dict[str, Any]:
    """Return aiperf's default configuration with lengths divided, and pauses divided by eight.

    Answers are shorter still, and sessions end after a fixed number of turns.
    """

    def part(**n_tokens: int) -> dict[str, int]:
        return {name: n // load.divisor for name, n in n_tokens.items()}

    answer = dict.fromkeys(("mean", "median", "max"), N_ANSWER_TOKENS)
    return {
        "new_tokens_per_turn": {**part(mean=6000, median=6000, max=10000), "bias": 1.1},
        "generation_length": answer,
        "inter_turn_delay": {
            "agentic_fraction": 0.7,
            "agentic_delay": {"mean": 312, "median": 225, "max": 1250},
            "human_delay": {"mean": 5000, "median": 3125, "max": 15000},
        },
        "reset": None,
        "turns": dict.fromkeys(("mean", "median", "min", "max"), load.n_turns),
        **part(max_prompt_tokens=167_000),
        "block_size": _BLOCK_TOKENS,
        "cache": {
            **part(layer1_tokens=32_000, layer1_5_tokens=0),
            "layer2": part(mean=15_000, median=5000, max=30_000),
            "layer1_5_groups": {"num_groups": 1},
        },
    }


def save_tokenizer(folder: Path) -> None:
    """Write the tokenizer of the lab models as Hugging Face's libraries read it."""
    folder.mkdir(parents=True)
    _lab_tokenizer().save(str(folder / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))


def _lab_tokenizer() -> Tokenizer:
    vocabulary = train_vocabulary()
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in vocabulary.merges)]
    tokenizer = Tokenizer(models.BPE(ids, merges))
    split = pre_tokenizers.Split(Regex(PRE_TOKENIZER_PATTERN), "isolated")
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, in_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIAL_TOKENS])
    return tokenizer
