"""Real llama-servers of older builds, as a program that takes llama-server's flags.

PyPI's `xllamacpp` wheels hold llama-server's own code; their versions name the build. A wheel is unpacked
into a folder of its own, beside a script `llama-server` that starts this module with it.

python -m tests.lab.older_server [VERSION ...]
"""

import argparse
import importlib
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

OLDEST = "2026.4.8672"
BUILDS = (OLDEST, "2026.6.9713", "2026.9.11063")
"""Those that tests run on: the first saves more than a window, the others need the repair; the first two
write files of version 2 and keep context checkpoints over a restore, the last one writes version 3."""
FOLDER = Path(__file__).resolve().parents[2] / ".lab" / "older-builds"

_ON_OFF = {"on": True, "off": False}


def binary_of(version: str) -> Path:
    """Return the program that `make` puts there."""
    return FOLDER / version / "llama-server"


def install(version: str) -> None:
    """Unpack a wheel into its folder, and write the script that serves with it, unless it is there."""
    script = binary_of(version)
    if script.exists():
        return
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    wheel = ["--no-deps", "--upgrade", "--target", str(script.parent), f"xllamacpp=={version}"]
    subprocess.run([*pip, *wheel], check=True)
    command = [sys.executable, str(Path(__file__).resolve()), "serve", str(script.parent)]
    script.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    script.chmod(0o755)


def flags() -> argparse.ArgumentParser:
    """Return those of llama-server's flags that tests give."""
    parser = argparse.ArgumentParser(prog="llama-server", allow_abbrev=False)
    parser.add_argument("--version", action="store_true")
    parser.add_argument("-m", "--model", dest="model.path")
    parser.add_argument("--host", dest="hostname")
    parser.add_argument("--port", type=int)
    parser.add_argument("-c", "--ctx-size", dest="n_ctx", type=int)
    parser.add_argument("-np", "--parallel", dest="n_parallel", type=int)
    parser.add_argument("-t", "--threads", dest="n_threads", type=int)
    parser.add_argument("--threads-http", dest="n_threads_http", type=int)
    parser.add_argument("--cache-ram", dest="cache_ram_mib", type=int)
    parser.add_argument("--ctx-checkpoints", dest="n_ctx_checkpoints", type=int)
    parser.add_argument("--checkpoint-min-step", type=int)
    parser.add_argument("--slot-save-path")
    parser.add_argument("-fa", "--flash-attn", dest="flash_attn_type", type=_flash_attention)
    parser.add_argument("--fit", dest="fit_params", type=_ON_OFF.get)
    parser.add_argument("--metrics", dest="endpoint_metrics", action="store_true")
    parser.add_argument("--swa-full", action="store_true")
    parser.add_argument("--no-repack", action="store_true", default=None, dest="no_extra_bufts")
    parser.add_argument("--spec-type", choices=["draft-mtp"])
    parser.set_defaults(endpoint_slots=True, n_gpu_layers=0)
    return parser


def _flash_attention(value: str) -> int:
    return {"on": 1, "off": 0, "auto": -1}[value]


def serve(folder: Path, arguments: list[str]) -> None:
    """Serve until SIGTERM, as llama-server does."""
    given = {k: v for k, v in vars(flags().parse_args(arguments)).items() if v is not None}
    sys.path.insert(0, str(folder))
    xllamacpp = importlib.import_module("xllamacpp")
    if given.pop("version"):
        return print(f"version: {xllamacpp.__version__}")
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    server = xllamacpp.Server(_parameters(xllamacpp, given))
    print(f"listening on {server.listening_address}", flush=True)
    signal.sigwait((signal.SIGTERM, signal.SIGINT))


def _parameters(xllamacpp: Any, given: dict[str, Any]) -> Any:
    parameters = xllamacpp.CommonParams()
    parameters.model.path = given.pop("model.path")
    n_threads = given.pop("n_threads", 1)
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = n_threads
    if hasattr(parameters, "hostnames"):
        parameters.hostnames = [given.pop("hostname", "127.0.0.1")]
    if path := given.pop("slot_save_path", ""):
        given["slot_save_path"] = path.rstrip("/") + "/"
    if given.pop("spec_type", ""):
        # An AttributeError ends a build without it, as an unknown flag ends llama-server.
        drafts = xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_MTP
        parameters.speculative.types = [drafts]
    for name, value in given.items():
        setattr(parameters, name, value)
    return parameters


def main() -> None:
    """Install builds, those that tests run on by default, or serve with one."""
    match sys.argv[1:]:
        case ["serve", folder, *arguments]:
            serve(Path(folder), arguments)
        case versions:
            for version in versions or BUILDS:
                install(version)


if __name__ == "__main__":
    main()
