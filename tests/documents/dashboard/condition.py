"""What is wrong, what was learned, and what llama-server itself says."""

from proxy.settings import MAX_REQUESTS
from tests.documents.dashboard.model import (
    BAD,
    BLUE,
    DULL,
    FAIR,
    GOOD,
    RANGE,
    STEP,
    Annotation,
    Kind,
    Panel,
    Query,
    Row,
    per_minute,
    series,
    total,
)

ANNOTATIONS = (
    Annotation(
        "Restarts",
        f"increase({series('degradations_total', kind='attaching')}[2m]) > 0 "
        f"or resets({series('lookup_seconds_count')}[2m]) > 0",
        BAD,
    ),
    Annotation(
        "Evictions",
        f"sum by (instance) (increase({series('evictions_total', reason='budget|free space')}[2m])) > 0",
        FAIR,
    ),
)
"""When llama-server was attached anew or the proxy started, and when room had to be made."""

TROUBLE = Row(
    "Trouble",
    (
        Panel(
            "What /health names",
            Kind.TIMELINE,
            (Query(f"max by (kind) ({series('degraded')}) == 1", "{{kind}}"),),
            "none",
            "A bar for each reason why requests were served slower, or less safely, than they "
            "could be, as long as it lasted. docs/monitoring.md has the cure of each.",
            width=12,
            if_empty="nothing is wrong",
        ),
        Panel(
            "Faults",
            Kind.LINES,
            (
                Query(total("cache_faults", STEP), "faults of the cache"),
                Query(total("restore_ineffective", STEP), "restores that were not reused"),
                Query(total("live_reuse_short", STEP), "slots that held less than known"),
                Query(total("drift", STEP), "slots that held something else"),
                Query(total("tokenization_disagreements", STEP), "prompts tokenized otherwise"),
            ),
            "none",
            "Each costs some request its speed, never its answer. Slots that held less or something "
            "else: somebody uses llama-server past the proxy. The others should be zero; the log "
            "says more.",
            width=12,
        ),
        Panel(
            "Requests not answered",
            Kind.STACKED,
            (Query(per_minute("unanswered_requests", "reason"), "{{reason}}"),),
            "reqpm",
            "client left: agents give up requests all the time. llama-server gone: it died or was "
            f"restarted. queue full: over {MAX_REQUESTS:,} at once for each URL of `upstream`. proxy "
            "stopped: it was stopped, and `drain_seconds` did not suffice.",
            width=12,
            colors={
                "client left": DULL,
                "llama-server gone": BAD,
                "queue full": FAIR,
                "proxy stopped": DULL,
                "other": BLUE,
            },
        ),
        Panel(
            "Requests rewritten",
            Kind.RANKED,
            (Query(f"{total('stabilized_requests', RANGE, 'stabilizer')} > 0", "{{stabilizer}}"),),
            "short",
            "By stabilizer, in the time range: what a client changes at the beginning of its "
            "prompts, and the proxy takes back.",
            width=12,
            if_empty="none",
        ),
    ),
)

LEARNED = Row(
    "What the proxy has learned of this server",
    (
        Panel(
            "Rule",
            Kind.NAMES,
            (Query(f"max by (rule) ({series('rule')} == 1)", "{{rule}}"),),
            "none",
            "What a restored state is good for on this model and build: any prefix of it, its "
            "restore points, its end only, or nothing.",
            if_empty="not measured yet",
            colors={"any prefix": GOOD, "restore points": GOOD, "end only": FAIR, "nothing": BAD},
        ),
        Panel(
            "Speed of evaluation",
            Kind.LINES,
            (
                Query(
                    f"max by (up_to) ({series('evaluation_tokens_per_second')}) > 0",
                    "up to {{up_to}} tokens",
                ),
            ),
            "suffix: tokens/s",
            "How fast prompt tokens are evaluated, by how far into the prompt they are (none: "
            "further than all). What seconds saved are reckoned by.",
        ),
        Panel(
            "Speed of saves and restores",
            Kind.LINES,
            (
                Query(
                    f"max by (file) ({series('restore_bytes_per_second')}) > 0", "restore, {{file}}"
                ),
                Query(f"max({series('save_bytes_per_second')}) > 0", "save"),
            ),
            "Bps",
            "warm: read from the page cache; cold: from the disk.",
        ),
    ),
    is_folded=True,
)
