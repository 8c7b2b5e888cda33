"""The command line, `llama-prefix-cache`, the same as `python -m proxy`."""

import sys
from importlib import resources

try:
    import click

    from proxy import __version__
    from proxy.cli import connect, look, serve, store, trace
    from proxy.cli.command import Commands
    from proxy.llama.files import SUPPORTED_VERSIONS
    from proxy.store.index import FORMAT_VERSION
except KeyboardInterrupt:  # Ctrl-C in the second that this takes
    raise SystemExit(130) from None


def version_text() -> str:
    """Return version and commit, and the formats of files that this build reads and writes."""
    try:
        commit = resources.files("proxy").joinpath("commit.txt").read_text().strip()
    except OSError:  # the build did not know it
        commit = ""
    built_from = f" (commit {commit})" if commit else ""
    versions = " and ".join(map(str, SUPPORTED_VERSIONS))
    return (
        f"llama-prefix-cache {__version__}{built_from}\n"
        f"llama-server's slot files: versions {versions}\n"
        f"index: format {FORMAT_VERSION}"
    )


@click.group(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, message=version_text())
def main() -> None:
    """A persistent, token-exact prefix cache in front of an unmodified llama-server."""


for command in (
    *(serve.serve, serve.run, serve.warm),
    *(look.doctor, look.config_, connect.connect, look.explain, look.stats),
    *(store.ls, store.pin, store.unpin, store.rm),
    *(store.check, store.export, store.import_, trace.trace, trace.bench),
):
    main.add_command(command)

if __name__ == "__main__":
    main(prog_name="python -m proxy" if sys.argv[0].endswith("__main__.py") else None)
