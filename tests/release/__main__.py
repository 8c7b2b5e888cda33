"""`make release-check`: whether what lies here can be given to people."""

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from proxy import __version__
from tests.release.licences import unfit_licences
from tests.release.packages import (
    REPOSITORY,
    build,
    install,
    missing_from,
    run,
    run_module,
    write_bill,
)

DIST = REPOSITORY / "dist"


def complaints(folder: Path) -> Iterator[str]:
    """Yield what is wrong; a step that cannot be done at all raises CalledProcessError."""
    packages = build(DIST)
    print(
        f"built      {packages.sdist.name}, {packages.wheel.name}, {write_bill(packages.wheel).name}"
    )
    yield from missing_from(packages)
    print(run_module("twine", "--no-color", "check", "--strict", *map(str, packages)).strip())
    for package in packages:
        python = install(package, folder / package.suffix.strip("."))
        told = run(str(python.with_name("llama-prefix-cache")), "--version", cwd=folder)
        print(f"installed  {package.name}: {told.splitlines()[0]}")
        if not told.startswith(f"llama-prefix-cache {__version__}"):
            yield f"{package.name} says of itself: {told}"
    yield from unfit_licences(python)
    changes = (REPOSITORY / "CHANGELOG.md").read_text()
    if not re.search(rf"^## \[(Unreleased|{re.escape(__version__)})\]", changes, re.M):
        yield f"CHANGELOG.md has no section for {__version__}"
    print(
        run_module(
            "pytest", "tests/unit/test_documents.py", "tests/unit/test_documented_blocks.py"
        ).strip()
    )


def main() -> None:
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        found = list(complaints(Path(folder)))
    for complaint in found:
        print(f"wrong      {complaint}")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
