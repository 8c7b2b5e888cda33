"""What there is to say of the shared directory: pure, facts in and findings out."""

from collections.abc import Iterator

from proxy.doctor.facts import CostFacts, DirectoryFacts, ProbeSaveFacts
from proxy.doctor.verdict import Finding, blocker, limit, ok
from proxy.doctor.words import size

DIRECTORY, PERMISSIONS, SPACE = "directory", "permissions", "disk space"
USUAL_TOKENS = 10_000
LEAST_FREE_BYTES = 64 << 20
"""What must be free where the size of a state is not known."""


def directory_findings(
    directory: DirectoryFacts, saved: ProbeSaveFacts | None, cost: CostFacts | None
) -> Iterator[Finding]:
    """Yield whether both processes can use the directory, who else can, and how much fits in."""
    yield from use_findings(directory, saved)
    yield from place_findings(directory, saved, cost)


def use_findings(directory: DirectoryFacts, saved: ProbeSaveFacts | None) -> Iterator[Finding]:
    """Yield whether both processes can use the directory."""
    if directory.problem:
        yield blocker(
            DIRECTORY,
            f"uid {directory.own_uid} cannot use {directory.path}: {directory.problem}.",
            f"Give it to the user who runs llama-server and the proxy: chown USER {directory.path}."
            f" For two users: {_share(directory.path)}",
        )
    elif saved is not None:
        yield from _probe_save_findings(directory, saved)


def place_findings(
    directory: DirectoryFacts, saved: ProbeSaveFacts | None, cost: CostFacts | None
) -> Iterator[Finding]:
    """Yield who else can get at the directory, and how much fits in."""
    yield from _permission_findings(directory, saved)
    yield from _space_findings(directory, cost)


def _share(path: str) -> str:
    return f"chgrp GROUP {path} && chmod 2770 {path}, with both users in GROUP."


def _probe_save_findings(directory: DirectoryFacts, saved: ProbeSaveFacts) -> Iterator[Finding]:
    path = directory.path
    if saved.refusal:
        yield blocker(
            DIRECTORY,
            f"llama-server could not save a slot into its --slot-save-path: {saved.refusal}.",
            f"Let llama-server's user write there (chown or {_share(path)}), and see that the disk"
            " is not full.",
        )
    elif not saved.has_appeared:
        yield blocker(
            DIRECTORY,
            f"llama-server saved a slot, but no file appeared in {path}: it writes elsewhere.",
            f"Start llama-server with --slot-save-path {path}, or give doctor and serve the directory"
            " that llama-server has; in containers, mount the same volume in both. The probe,"
            f" {saved.left_behind}, lies where llama-server writes: remove it.",
        )
    elif saved.problem:
        yield blocker(
            DIRECTORY,
            f"llama-server writes files of uid {saved.owner_uid}, mode {saved.mode:o}, which uid"
            f" {directory.own_uid} cannot use: {saved.problem}.",
            f"Run both as one user; or {_share(path)} and start llama-server with umask 007"
            " (UMask=0007 in a systemd unit).",
        )
    elif not saved.is_whole:
        yield blocker(
            DIRECTORY,
            "The file that appeared is not what llama-server says it saved.",
            "Use a local disk for --slot-save-path, and a llama-server of build 0.5 or later.",
        )
    else:
        yield ok(DIRECTORY, f"A slot saved by llama-server appears in {path} and can be removed.")
    if saved.left_behind and saved.has_appeared:
        yield blocker(
            DIRECTORY,
            f"uid {directory.own_uid} cannot remove what llama-server writes;"
            f" {saved.left_behind} is still there.",
            f"Remove {path}/{saved.left_behind}, then {_share(path)} The directory must not be sticky.",
        )


def _permission_findings(
    directory: DirectoryFacts, saved: ProbeSaveFacts | None
) -> Iterator[Finding]:
    if not directory.mode:
        return
    path, mode = directory.path, directory.mode
    is_for_two = (
        saved is not None and saved.has_appeared and saved.owner_uid != directory.own_uid != 0
    )
    if mode & 0o007:
        command = f"chmod {'2770' if is_for_two or mode & 0o2000 else '700'} {path}"
        yield limit(
            PERMISSIONS,
            f"Every user of this machine can get at {path} (mode {mode:o}), and saved states are as"
            " good as transcripts.",
            command,
        )
    elif is_for_two and not mode & 0o2000:
        yield limit(
            PERMISSIONS,
            f"llama-server and the proxy are different users, but new files in {path}"
            f" (mode {mode:o}) do not get its group.",
            f"Share it by group: {_share(path)}",
        )
    else:
        as_root = (
            ""
            if directory.own_uid
            else " Checked as root, who may do anything: run doctor as the user who runs the proxy."
        )
        yield ok(PERMISSIONS, f"Mode {mode:o}, uid {directory.owner_uid}.{as_root}")


def _space_findings(directory: DirectoryFacts, cost: CostFacts | None) -> Iterator[Finding]:
    free = directory.free_bytes
    if free is None:
        return
    state_bytes = cost.largest_state_bytes(USUAL_TOKENS) if cost else LEAST_FREE_BYTES
    needed = directory.min_free_bytes + state_bytes
    budget_left = max(0, directory.budget_bytes - directory.used_bytes)
    if free < needed:
        yield blocker(
            SPACE,
            f"The disk is nearly full: {size(free)} free; a state of {USUAL_TOKENS:,} tokens may need"
            f" {size(state_bytes)}, and {size(directory.min_free_bytes)} are left free"
            " (--min-free-bytes).",
            f"Free some space, or use another disk: a new --slot-save-path for llama-server and here"
            f" (now {directory.path}).",
        )
    elif (usable := free - directory.min_free_bytes) < budget_left:
        can_have = (directory.used_bytes + usable * 9 // 10) >> 20
        yield limit(
            SPACE,
            f"{size(free)} free, but --max-store-bytes allows {size(budget_left)} more: the disk would"
            " fill up first.",
            f"Give serve --max-store-bytes {can_have}MiB, or free some space.",
        )
    else:
        yield ok(SPACE, f"{size(free)} free; the budget allows {size(budget_left)} more.")
