"""What `llama-prefix-cache --version` tells: what this is, where it comes from, what it can read."""

from importlib import resources

from proxy import __version__
from proxy.store.index import FORMAT_VERSION
from proxy.upstream.state_file import SUPPORTED_VERSIONS


def find_commit() -> str | None:
    """Return the git commit that the package was built from; None where the build did not know it."""
    try:
        return resources.files("proxy").joinpath("commit.txt").read_text().strip() or None
    except OSError:
        return None


def version_text() -> str:
    """Return version and commit, and the formats of files that this build reads and writes."""
    commit = find_commit()
    built_from = f" (commit {commit})" if commit else ""
    versions = " and ".join(map(str, SUPPORTED_VERSIONS))
    return (
        f"llama-prefix-cache {__version__}{built_from}\n"
        f"llama-server's slot files: versions {versions}\n"
        f"index: format {FORMAT_VERSION}"
    )
