"""The names of the stabilizers: what settings, metrics and logs call them, and which are on by default.

Each name comes with the reason for the stabilizer, in one line. Imports nothing of the project, so
that the settings can check names.
"""

from enum import StrEnum


class Name(StrEnum):
    """The stabilizers; `safe` are those that do not change what the model is told in substance."""

    DROP_BILLING_HEADER = "drop_billing_header"
    DROP_CACHE_CONTROL = "drop_cache_control"
    TOOL_REFERENCE_TEXT = "tool_reference_text"
    TOOL_RESULTS_FIRST = "tool_results_first"
    HOIST_SYSTEM_MESSAGE = "hoist_system_message"
    FOLD_SYSTEM_MESSAGES = "fold_system_messages"
    RESTORE_TOOL_ARGUMENTS = "restore_tool_arguments"
    KEEP_TOOL_ORDER = "keep_tool_order"
    GLUE_TEXT_TO_RESULTS = "glue_text_to_results"
    STICKY_TOOL_TEXT = "sticky_tool_text"
    STICKY_DATE = "sticky_date"
    STICKY_REMINDERS = "sticky_reminders"
    INLINE_REASONING = "inline_reasoning"


REASONS = {
    Name.DROP_BILLING_HEADER: (
        "Its digits change with every session, some with every request, at the top of the prompt."
    ),
    Name.DROP_CACHE_CONTROL: (
        "Marks for another server's cache; they move with every request and mean nothing here."
    ),
    Name.TOOL_REFERENCE_TEXT: (
        "llama-server drops tool_reference blocks, so the model is never told what was loaded."
    ),
    Name.TOOL_RESULTS_FIRST: (
        "llama-server renders text beside tool results before them; the client wrote it after them."
    ),
    Name.HOIST_SYSTEM_MESSAGE: (
        "A long constant system message behind the first user text cannot be shared by sessions."
    ),
    Name.FOLD_SYSTEM_MESSAGES: (
        "Many templates refuse system messages in the middle of a conversation."
    ),
    Name.RESTORE_TOOL_ARGUMENTS: (
        "Clients send tool calls back with other keys, order or numbers than the model wrote."
    ),
    Name.KEEP_TOOL_ORDER: (
        "A tool loaded later is inserted in the middle of the list; at the end it costs nothing."
    ),
    Name.GLUE_TEXT_TO_RESULTS: (
        "Text beside tool results begins a new turn, for which many templates drop old reasoning."
    ),
    Name.STICKY_TOOL_TEXT: (
        "Modes such as plan and build change a tool's description in mid-conversation."
    ),
    Name.STICKY_DATE: (
        "A date or time in the system prompt changes, and the whole prompt with it."
    ),
    Name.STICKY_REMINDERS: (
        "Reminders move from the old user message to the newest, which changes the old one."
    ),
    Name.INLINE_REASONING: (
        "Many templates drop old reasoning at each new user message, and with it the prefix."
    ),
}

SAFE = frozenset(
    {
        Name.DROP_BILLING_HEADER,
        Name.DROP_CACHE_CONTROL,
        Name.TOOL_REFERENCE_TEXT,
        Name.TOOL_RESULTS_FIRST,
        Name.HOIST_SYSTEM_MESSAGE,
        Name.FOLD_SYSTEM_MESSAGES,
        Name.RESTORE_TOOL_ARGUMENTS,
        Name.KEEP_TOOL_ORDER,
    }
)

_WORDS = "|".join(("safe", "all", "none", *Name))
SWITCHES_PATTERN = rf"^\s*({_WORDS})(\s*,\s*-?({_WORDS}))*\s*$"
"""What `parse_switches` reads."""


def parse_switches(text: str) -> frozenset[Name]:
    """Return which stabilizers are on: words separated by commas, read from left to right.

    `safe`, `all` and `none` stand for sets; a minus before a word takes it out again.
    """
    sets = {"safe": SAFE, "all": frozenset(Name), "none": frozenset[Name]()}
    switched_on = frozenset[Name]()
    for word in text.split(","):
        bare = word.strip()
        meant = bare.removeprefix("-")
        names = sets[meant] if meant in sets else frozenset({Name(meant)})
        switched_on = switched_on - names if bare.startswith("-") else switched_on | names
    return switched_on
