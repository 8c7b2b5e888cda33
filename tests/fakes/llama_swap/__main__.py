"""python -m tests.fakes.llama_swap --config FILE --listen HOST:PORT"""

import argparse
from pathlib import Path

from aiohttp import web

from tests.fakes.llama_swap.config import read_config
from tests.fakes.llama_swap.server import LlamaSwap

SHUTDOWN_SECONDS = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("config.yaml"))
    parser.add_argument("--listen", default=":8080")
    arguments = parser.parse_args()
    host, _, port = arguments.listen.rpartition(":")
    web.run_app(
        LlamaSwap(read_config(arguments.config)).app(),
        host=host or None,
        port=int(port),
        handler_cancellation=True,  # a client that goes away cancels what it asked for
        shutdown_timeout=SHUTDOWN_SECONDS,
    )


if __name__ == "__main__":
    main()
