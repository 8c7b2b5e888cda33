"""Shows what the proxy is for, on a real llama-server: `make demo`.

The same session, with the same restart of everything in the middle, through the proxy and on llama-server
alone, at the same time: each llama-server has one thread. Evaluated tokens are llama-server's own count, so
the proxy's calls are included. Fails if what it shows is not what the proxy promises.
"""

import argparse
import asyncio
import re
import sys
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from tests.bench.demo_report import failures, results_table, summary
from tests.bench.interrupts import run_to_the_end
from tests.bench.play import Measured, Player, RequestFailed
from tests.bench.processes import ProxyError, Setup, Stack
from tests.bench.workload import session
from tests.lab.server import LlamaServerError

NARROWEST = 100
_BEFORE = (
    "A coding session of eight requests, with the proxy and without; a minute or two on two cores."
)
_NEXT = (
    "Next: with a model of yours, `llama-prefix-cache run -- llama-server -m model.gguf -c 65536 -fa on`\n"
    "(docs/quickstart.md); or see real words, `make demo MODEL=smollm2`."
)
EXPECTED_FAILURES = (LlamaServerError, ProxyError, RequestFailed, OSError, RuntimeError)


class Demo:
    """One run of the demo on one terminal."""

    def __init__(self, console: Console, leftovers: ExitStack) -> None:
        self._console = console
        self._leftovers = leftovers
        self._failed: Stack | None = None

    async def run(self) -> int:
        """Play both sessions and print the results; return the exit status."""
        self._console.print(_BEFORE, highlight=False)
        try:
            with self._console.status("both at once"):
                through_proxy, alone = await asyncio.gather(
                    self._play("proxy", has_proxy=True), self._play("alone", has_proxy=False)
                )
        except EXPECTED_FAILURES as error:
            return self._fail((str(error) or type(error).__name__).splitlines()[0])
        self._console.print(results_table(through_proxy, alone))
        broken = failures(through_proxy, alone)
        for failure in broken:
            self._console.print(f"[bold red]not as promised:[/] {failure}")
        if not broken:
            self._console.print(summary(through_proxy, alone), highlight=False)
            self._console.print(_NEXT, highlight=False)
        return 1 if broken else 0

    async def _play(self, title: str, *, has_proxy: bool) -> list[Measured]:
        # A second thread spins, which makes llama-server many times slower on a busy machine. What the
        # model says is not what the session goes on with, so nothing is evaluated ahead.
        setup = Setup(n_threads=1, proxy_options=("--ahead-seconds", "0"))
        stack = Stack("hybrid", "small", self._leftovers, has_proxy=has_proxy, setup=setup)
        try:
            await stack.start()
            player, results = Player(stack), []
            for request in session():
                if request.restarts:
                    self._tell(title, "[dim]stop everything, start everything[/]")
                results.append(await player.play(request))
                self._tell(title, _progress(results[-1]))
            await stack.stop()
        except EXPECTED_FAILURES:
            self._failed = stack
            raise
        return results

    def _tell(self, title: str, line: str) -> None:
        self._console.print(f"[bold]{title}[/]  {line}", highlight=False)

    def _fail(self, reason: str) -> int:
        self._console.print("the demo failed: " + reason, style="bold red", markup=False)
        if self._failed is not None:
            self._console.print(self._failed.log_tail(), style="dim", markup=False, highlight=False)
        return 1


def _progress(measured: Measured) -> str:
    return (
        f"{measured.request.label:<22}{measured.n_evaluated:>7,} of {measured.n_prompt:,} tokens "
        f"evaluated, first token after {measured.first_token_seconds:.2f} s"
    )


async def show(leftovers: ExitStack, picture: Path | None) -> int:
    """Run the demo on the standard output; draw the terminal into *picture*, an SVG file."""
    console = Console()
    if picture or not console.is_terminal:
        console = Console(width=NARROWEST, record=picture is not None)
    status = await Demo(console, leftovers).run()
    if picture and not status:
        _draw(console, picture)
    return status


def _draw(console: Console, picture: Path) -> None:
    """Draw the terminal, without the fonts that a browser would fetch from elsewhere."""
    drawn = console.export_svg(title="make demo")
    picture.write_text(re.sub(r"@font-face \{.*?\}\s*|\s*<!--.*?-->", "", drawn, flags=re.DOTALL))


def main() -> int:
    parser = argparse.ArgumentParser(description="Show what the proxy is for.")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the terminal into FILE")
    arguments = parser.parse_args()
    return run_to_the_end(lambda leftovers: show(leftovers, arguments.svg))


if __name__ == "__main__":
    sys.exit(main())
