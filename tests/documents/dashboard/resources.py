"""What happens to slots, to the queue and to the store."""

from tests.documents.dashboard.model import (
    BAD,
    BLUE,
    DULL,
    FAIR,
    GOOD,
    Kind,
    Panel,
    Query,
    Row,
    gauge,
    median_and_worst,
    per_minute,
    per_second,
    quantile,
)

SLOTS = Row(
    "Slots and queue",
    (
        Panel(
            "Slots",
            Kind.STACKED,
            (Query(gauge("slots", "state"), "{{state}}"),),
            "none",
            "What llama-server's slots are doing: leased (in use), or free with content that is "
            "known, empty or unknown. All leased for long: more requests than slots. Unknown ones "
            "reuse less.",
            colors={"leased": FAIR, "known": GOOD, "empty": DULL, "unknown": BAD},
        ),
        Panel(
            "Waiting requests",
            Kind.LINES,
            (Query(gauge("waiting_requests"), "waiting"),),
            "none",
            "Requests that wait for a slot, or for llama-server to come back.",
            colors={"waiting": FAIR},
        ),
        Panel(
            "Time in the queue, and of planning",
            Kind.LINES,
            (
                *median_and_worst("queue_seconds", "queue"),
                Query(quantile(0.95, "lookup_seconds"), "lookup and plan, p95"),
            ),
            "s",
            "How long requests waited for a slot once their prompt was known, and how long the "
            "proxy took to look up checkpoints and plan, which should be milliseconds.",
        ),
    ),
)

STORE = Row(
    "Store",
    (
        Panel(
            "Size",
            Kind.LINES,
            (
                Query(gauge("checkpoint_bytes"), "checkpoints"),
                Query(gauge("checkpoint_limit_bytes"), "budget"),
                Query(gauge("disk_free_bytes"), "free on the disk"),
            ),
            "bytes",
            "A store that has been in use for a while lies just below its budget; that is well as "
            "long as what goes is not missed. Free space has its own axis, at the right.",
            colors={"checkpoints": BLUE, "budget": BAD, "free on the disk": DULL},
            apart=("free on the disk",),
        ),
        Panel(
            "Checkpoints",
            Kind.LINES,
            (Query(gauge("checkpoints"), "checkpoints"),),
            "none",
            "How many there are. A long conversation keeps one or two, and each header one.",
            colors={"checkpoints": BLUE},
        ),
        Panel(
            "Evicted and not saved",
            Kind.STACKED,
            (
                Query(per_minute("evictions", "reason"), "evicted: {{reason}}"),
                Query(per_minute("saves_skipped", "reason"), "not saved: {{reason}}"),
            ),
            "opm",
            "Superseded ones were replaced by a newer state and are not missed. Many for the "
            "budget: raise max_store_bytes. Free space: the disk is nearly full. Broken: somebody "
            "deletes files.",
        ),
        Panel(
            "Time of a save and of a restore",
            Kind.LINES,
            (
                *median_and_worst("restore_seconds", "restore"),
                *median_and_worst("save_seconds", "save"),
            ),
            "s",
            "What the disk, or the page cache, makes of it. A restore comes before the first "
            "token; a save stops every slot.",
            colors={
                "restore, p50": GOOD,
                "restore, p95": "light-green",
                "save, p50": BLUE,
                "save, p95": "light-blue",
            },
        ),
        Panel(
            "Saves and restores",
            Kind.STACKED,
            (
                Query(per_minute("restores", "result"), "restores {{result}}"),
                Query(per_minute("saves", "result"), "saves {{result}}"),
            ),
            "opm",
            "Many saves for each restore: conversations that nobody comes back to, or a write "
            "budget worth setting. Missing: the file was gone.",
            colors={
                "restores done": GOOD,
                "restores missing": FAIR,
                "restores refused": BAD,
                "saves done": BLUE,
                "saves failed": "dark-red",
            },
        ),
        Panel(
            "Written within 24 hours",
            Kind.LINES,
            (
                Query(gauge("written_last_day_bytes"), "written"),
                Query(f"{gauge('write_limit_bytes')} > 0", "budget"),
            ),
            "bytes",
            "What saves wrote to the disk in the last 24 hours, and max_write_bytes_per_day if it "
            "is set. Flash wears out by being written to.",
            colors={"written": BLUE, "budget": BAD},
        ),
    ),
)

SHARED = Row(
    "Shared store",
    (
        Panel(
            "States sent and fetched",
            Kind.LINES,
            (Query(per_second("shared_bytes_total", "direction"), "{{direction}}"),),
            "Bps",
            "Bytes of states that went up into shared_store, and that came down from it.",
            colors={"up": BLUE, "down": GOOD},
        ),
        Panel(
            "Fetches",
            Kind.STACKED,
            (Query(per_minute("shared_fetches", "result"), "{{result}}"),),
            "opm",
            "dearer: evaluating was quicker than the link, which is no fault. late: a transfer that "
            "had begun was given up for that. gone: another proxy had deleted the state.",
            colors={
                "done": GOOD,
                "dearer": DULL,
                "late": FAIR,
                "damaged": BAD,
                "failed": "dark-red",
            },
        ),
        Panel(
            "Failures",
            Kind.STACKED,
            (Query(per_minute("shared_faults", "operation"), "{{operation}}"),),
            "opm",
            "Calls of the shared store that failed. Requests go on without it; /health has the error.",
        ),
    ),
    is_folded=True,
)
"""Nothing happens here without `shared_store`."""
