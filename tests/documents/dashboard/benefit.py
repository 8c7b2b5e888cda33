"""Whether it hits, and what it saves."""

from tests.documents.dashboard.model import (
    BAD,
    BLUE,
    DULL,
    FAIR,
    GOOD,
    HITS,
    RANGE,
    Kind,
    Panel,
    Query,
    Row,
    median_and_worst,
    per_minute,
    per_second,
    quantile,
    series,
    total,
)

AT_A_GLANCE = Row(
    "",
    (
        Panel(
            "State",
            Kind.NAMES,
            (Query(f"max by (state) ({series('state')} == 1)", "{{state}}"),),
            "none",
            "What the proxy does now: caching; degraded (cached, but something costs speed); "
            "forwarding (nothing is cached). The row Trouble names why.",
            width=4,
            height=4,
            if_empty="not scraped",
            colors={"caching": GOOD, "degraded": FAIR, "forwarding": BAD},
        ),
        Panel(
            "Tokens reused",
            Kind.VALUES,
            (
                Query(
                    f"{total('prompt_tokens', RANGE, source='reused')} / {total('prompt_tokens', RANGE)}",
                    "",
                ),
            ),
            "percentunit",
            "Of all prompt tokens in the time range, how many llama-server did not have to "
            "evaluate. Agents resend everything, so 90 % and more is usual; below 50 % look at "
            "the row Misses.",
            width=4,
            height=4,
            if_empty="no requests",
            steps=((None, BAD), (0.5, FAIR), (0.8, GOOD)),
        ),
        Panel(
            "Requests with a hit",
            Kind.VALUES,
            (Query(f"{total('requests', RANGE, outcome=HITS)} / {total('requests', RANGE)}", ""),),
            "percentunit",
            "Of all requests in the time range, how many reused more than 64 tokens. The first request "
            "of each conversation has nothing to reuse, unless another one has shown its header "
            "before.",
            width=4,
            height=4,
            if_empty="no requests",
            steps=((None, BAD), (0.4, FAIR), (0.7, GOOD)),
        ),
        Panel(
            "Time saved",
            Kind.VALUES,
            (Query(f"{total('saved_seconds', RANGE)} - {total('lost_seconds', RANGE)}", ""),),
            "s",
            "What evaluating the reused tokens would have taken, at the speeds measured on this "
            "server, less the time of the restores. Clients waited that much less.",
            width=4,
            height=4,
            steps=((None, BAD), (0, BLUE)),
        ),
        Panel(
            "Tokens not evaluated",
            Kind.VALUES,
            (
                Query(total("prompt_tokens", RANGE, source="reused"), "in all"),
                Query(total("restored_tokens", RANGE), "from checkpoints"),
            ),
            "short",
            "Prompt tokens in the time range that were reused; and those of them that came from a "
            "checkpoint, which only the proxy could spare llama-server. The rest was still in "
            "its slot.",
            width=4,
            height=4,
            colors={"in all": BLUE, "from checkpoints": "dark-green"},
        ),
        Panel(
            "First token after",
            Kind.VALUES,
            (
                Query(quantile(0.5, "first_token_seconds", RANGE, outcome=HITS), "hit"),
                Query(quantile(0.5, "first_token_seconds", RANGE, outcome="miss"), "miss"),
            ),
            "s",
            "The median time to the first token of streamed answers in the time range, with and "
            "without reuse.",
            width=4,
            height=4,
            if_empty="no streams",
            colors={"hit": GOOD, "miss": FAIR},
        ),
    ),
)

REUSE = Row(
    "Reuse",
    (
        Panel(
            "Hit rate",
            Kind.LINES,
            (
                Query(
                    f"{per_second('prompt_tokens_total', source='reused')}"
                    f" / {per_second('prompt_tokens_total')}",
                    "by tokens",
                ),
                Query(
                    f"{per_second('requests_total', outcome=HITS)} / {per_second('requests_total')}",
                    "by requests",
                ),
            ),
            "percentunit",
            "Of the prompt tokens, how many were reused; of the requests, how many reused "
            "something. A dip by tokens alone is a long prompt that was new, or changed near its "
            "beginning.",
            maximum=1.0,
            colors={"by tokens": GOOD, "by requests": BLUE},
        ),
        Panel(
            "Prompt tokens: evaluated against reused",
            Kind.STACKED,
            (
                Query(per_second("restored_tokens_total"), "restored from a checkpoint"),
                Query(
                    f"{per_second('prompt_tokens_total', source='reused')}"
                    f" - {per_second('restored_tokens_total')}",
                    "found in a slot",
                ),
                Query(per_second("prompt_tokens_total", source="evaluated"), "evaluated"),
            ),
            "suffix: tokens/s",
            "Where the tokens of prompts came from. Orange is what llama-server worked for; dark "
            "green is what only the proxy could spare it.",
            colors={
                "restored from a checkpoint": "dark-green",
                "found in a slot": "light-green",
                "evaluated": FAIR,
            },
        ),
        Panel(
            "Requests by outcome",
            Kind.STACKED,
            (Query(per_minute("requests", "outcome"), "{{outcome}}"),),
            "reqpm",
            "hit: all that was expected was reused; partial: less; miss: nothing, or at most 64 "
            "tokens; bypass: not looked up (images, for example); degraded: the cache failed, or "
            "llama-server was not attached; refused, failed: answered with 4xx, 5xx.",
            colors={
                "hit": GOOD,
                "partial": "yellow",
                "miss": FAIR,
                "bypass": DULL,
                "degraded": BAD,
                "refused": "purple",
                "failed": "dark-red",
            },
        ),
    ),
)

MISSES = Row(
    "Misses, and why",
    (
        Panel(
            "Causes",
            Kind.RANKED,
            (Query(f"sort_desc({total('missed_tokens', RANGE, 'cause')} > 0)", "{{cause}}"),),
            "short",
            "Prompt tokens in the time range that were evaluated although they were known, by "
            "cause. docs/misses.md has each cause and its cure; `llama-prefix-cache explain` "
            "shows the text.",
            if_empty="no misses",
        ),
        Panel(
            "Where in the prompt",
            Kind.RANKED,
            (
                Query(
                    f"sort_desc({total('misses', RANGE, 'cause, part')} > 0)", "{{cause}}: {{part}}"
                ),
            ),
            "short",
            "Requests in the time range, by cause and by the part of the prompt that was no "
            "longer the same. What changes near the beginning (tools, system) costs the most.",
            if_empty="no misses",
        ),
        Panel(
            "Causes over time",
            Kind.STACKED,
            (Query(f"{per_minute('misses', 'cause')} > 0", "{{cause}}"),),
            "reqpm",
            "Requests that had known tokens evaluated. A cause that sets in at once is a client, "
            "or a setting, that has changed.",
            if_empty="no misses",
        ),
    ),
)

TIME = Row(
    "Time",
    (
        Panel(
            "Time to the first token",
            Kind.LINES,
            (
                *median_and_worst("first_token_seconds", "hit", outcome=HITS),
                *median_and_worst("first_token_seconds", "miss", outcome="miss"),
            ),
            "s",
            "Of streamed answers, from arrival at the proxy, waiting included. p50 is the median; "
            "one in twenty takes longer than p95. The distance between hits and misses is what "
            "the cache is for.",
            colors={
                "hit, p50": GOOD,
                "hit, p95": "light-green",
                "miss, p50": FAIR,
                "miss, p95": "light-orange",
            },
        ),
        Panel(
            "Time saved per minute",
            Kind.STACKED,
            (
                Query(per_minute("saved_seconds", source="restored"), "from checkpoints"),
                Query(per_minute("saved_seconds", source="live"), "from live slots"),
                Query(f"-{per_minute('lost_seconds')}", "lost by restores"),
            ),
            "s",
            "Seconds of evaluation that clients did not wait for, less the time of restores. "
            "Lost: restores that took longer than evaluating would have; a slow disk, or a store "
            "that is too eager for it.",
            colors={
                "from checkpoints": "dark-green",
                "from live slots": "light-green",
                "lost by restores": BAD,
            },
        ),
        Panel(
            "Evaluating and restoring",
            Kind.LINES,
            (
                Query(per_second("evaluation_seconds_total"), "evaluating prompts"),
                Query(per_second("restore_seconds_sum"), "restoring checkpoints"),
                Query(per_second("save_seconds_sum"), "saving checkpoints"),
            ),
            "percentunit",
            "How much of the time llama-server spends on each; slots that work beside each other "
            "can make it more than 100 %. Restores should be far below the evaluation that they "
            "spare; saves stop every slot.",
            colors={
                "evaluating prompts": FAIR,
                "restoring checkpoints": GOOD,
                "saving checkpoints": BLUE,
            },
        ),
    ),
)
