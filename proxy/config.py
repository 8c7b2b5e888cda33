"""Settings: their names, types, defaults and limits.

Flags, environment, file and documentation name the same settings, so this struct is the only list of them.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from proxy.addresses import Address, Hosts, Urls
from proxy.stabilize.names import SWITCHES_PATTERN


def _more(words: str) -> dict[str, str]:
    """Return what the documentation says of a setting beyond its one-line description."""
    return {"more": words}


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings of the proxy.

    Descriptions go into --help, what is `_more` than that into docs/configuration.md and
    deploy/config.example.yaml as well; `make docs` writes both.
    """

    upstream: Annotated[
        Urls,
        Meta(
            description="URL of llama-server, of its router or of llama-swap.",
            extra=_more(
                "If it runs with --api-prefix, the prefix belongs to the URL. Several llama-servers with "
                "the same model and the same slot_save_path are separated by commas; see docs/models.md."
            ),
        ),
    ] = "http://127.0.0.1:8080"
    slot_save_path: Annotated[
        str,
        Meta(
            min_length=1,
            description="The directory that llama-server has as --slot-save-path, seen from here.",
            examples=["/var/lib/llama-prefix-cache"],
            extra=_more(
                "Both write to it: llama-server the states, the proxy everything else. States are as "
                "good as transcripts: keep the directory to yourself (chmod 700)."
            ),
        ),
    ]
    listen: Annotated[
        Address,
        Meta(
            description="HOST:PORT for clients.",
            extra=_more("Point OpenCode and the like at http://HOST:PORT/v1."),
        ),
    ] = "127.0.0.1:8081"
    admin: Annotated[
        Address,
        Meta(
            description="HOST:PORT for the live page, /health, /metrics, /checkpoints and /requests.",
            extra=_more("For operators, not for clients: it asks for no key."),
        ),
    ] = "127.0.0.1:8082"
    admin_hosts: Annotated[
        Hosts,
        Meta(
            description="Names by which the admin listener may be asked, such as llm.example.org.",
            extra=_more(
                "Besides addresses, names without a dot, private ones (.local, .lan, .internal) and that "
                "in admin. Under any other name only /health and /metrics are answered: a page of another "
                "site could have a name of its own lead here."
            ),
        ),
    ] = ""
    upstream_api_key: Annotated[
        str | None,
        Meta(
            description="llama-server's --api-key, for the proxy's own calls.",
            extra=_more("Clients' own keys are passed on as they are."),
        ),
    ] = None
    context_checkpoints: Annotated[
        int,
        Meta(
            ge=0,
            description="llama-server's --ctx-checkpoints.",
            extra=_more(
                "How many context checkpoints it keeps in a slot of a hybrid, recurrent or sliding-window "
                "model. Fewer make smaller files: try 8 for both."
            ),
        ),
    ] = 32
    max_store_bytes: Annotated[
        int,
        Meta(
            ge=1 << 20,
            description="Disk budget for checkpoints, such as 20GiB.",
            extra=_more(
                "Those being written count. What is cheapest to evaluate again goes first."
            ),
        ),
    ] = 20 << 30
    min_free_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Free space that saves leave on the disk, such as 2GiB.",
            extra=_more("Checkpoints go for it, too; without it nothing is saved."),
        ),
    ] = 2 << 30
    max_write_bytes_per_day: Annotated[
        int,
        Meta(
            ge=0,
            description="What saves may write within 24 hours, such as 50GiB; 0 is no limit.",
            extra=_more(
                "Flash wears out by being written to. Once less than half is left, what spares few seconds "
                "of evaluation for its bytes is not saved any more; restarts do not reset the count."
            ),
        ),
    ] = 0
    idle_save_seconds: Annotated[
        float,
        Meta(
            gt=0,
            description="A slot idle for this long is saved.",
            extra=_more("Unless a file already covers what it holds."),
        ),
    ] = 10.0
    max_requests: Annotated[
        int,
        Meta(
            ge=1,
            description="Generation requests at once; more are answered 503.",
            extra=_more("Waiting ones count; the 503 carries Retry-After."),
        ),
    ] = 256
    upstream_wait_seconds: Annotated[
        float,
        Meta(
            ge=0,
            description="How long a request waits for a llama-server that is away or loading.",
            extra=_more(
                "In arrival order, and counted by max_requests; then it is told 503 with Retry-After. Once "
                "llama-server has been unreachable for that long, requests fail at once, as they do if it "
                "was never reached. Give more than a large model takes to load."
            ),
        ),
    ] = 60.0
    max_body_bytes: Annotated[
        int,
        Meta(
            ge=1024,
            description="Largest request body of a generation.",
            extra=_more("Other requests stream through without a limit."),
        ),
    ] = 256 << 20
    drain_seconds: Annotated[
        float,
        Meta(
            ge=0,
            description="How long running requests may go on at shutdown.",
            extra=_more("Then slots are saved, in as long again at most."),
        ),
    ] = 30.0
    share_between_api_keys: Annotated[
        bool,
        Meta(
            description="Let clients with different API keys reuse each other's prefixes.",
            extra=_more(
                "Otherwise they share nothing; llama-server needs --cache-ram 0 for that, too."
            ),
        ),
    ] = False
    allow_state_changes: Annotated[
        bool,
        Meta(
            description="Let clients POST to /slots and /lora-adapters.",
            extra=_more(
                "Otherwise refused with 403; each time, all that is known about slots is learned anew."
            ),
        ),
    ] = False
    stabilizers: Annotated[
        str,
        Meta(
            title="`safe`, `all`, `none` and names, separated by commas",
            pattern=SWITCHES_PATTERN,
            description="Which rewrites of requests keep prompts from changing at their beginning.",
            extra=_more("Such as `safe, sticky_date, -keep_tool_order`; see docs/stabilizers.md."),
        ),
    ] = "safe"
    context_overflow: Annotated[
        Literal["pass", "stable"],
        Meta(
            description="A conversation that outgrows the context: pass to llama-server, or cut.",
            extra=_more(
                "pass: llama-server refuses it, and clients that can compact it. stable: the proxy leaves "
                "out the oldest turns, many at once, and goes on without them; see "
                "docs/context-overflow.md."
            ),
        ),
    ] = "pass"
    aliases: Annotated[
        str,
        Meta(
            title="`name = name of llama-server`, separated by commas",
            pattern=r"^\s*([^\s=,]+\s*=\s*[^\s=,]+\s*(,\s*[^\s=,]+\s*=\s*[^\s=,]+\s*)*)?$",
            description="What llama-server calls the models that clients name.",
            extra=_more("Such as `claude-opus-4-6 = qwen`; any other name is passed on as it is."),
        ),
    ] = ""
    explain_keep: Annotated[
        Literal["none", "tokens", "text"],
        Meta(
            description="What is kept of prompts to explain misses: none, tokens or text.",
            extra=_more(
                "In memory only, and shown on the admin listener alone; see docs/misses.md."
            ),
        ),
    ] = "text"
    join_upstream_metrics: Annotated[
        bool,
        Meta(
            description="Let /metrics show llama-server's own metrics as well.",
            extra=_more(
                "So that one scrape has both; llama-server needs --metrics. They are left out for as long "
                "as it does not give them."
            ),
        ),
    ] = False
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(
            description="Least level logged: debug, info, warning or error.",
            extra=_more("Prompt text is never logged."),
        ),
    ] = "info"
    log_format: Annotated[
        Literal["console", "json"],
        Meta(
            description="Form of the log lines: console or json.",
            extra=_more("Console is for people, json for machines."),
        ),
    ] = "console"


NAMES = Settings.__struct_fields__
