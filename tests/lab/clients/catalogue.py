"""All mutations, with what was seen of them between the real clients and real templates.

`seen` is the share of the prompt that survived there, system text first / tools first, and what the
remedy made of it; it stands beside what the tests measure on our own texts.
"""

from dataclasses import dataclass

from tests.lab.clients import claude_code_mutations as claude_code
from tests.lab.clients import opencode_mutations as opencode
from tests.lab.clients.mutation import Mutation


@dataclass(frozen=True)
class Row:
    """A mutation, what was seen of it, and what of the prompt is to survive here."""

    mutation: Mutation
    words: str
    seen: str
    least_with: tuple[float, float] = (0.999, 0.999)
    """With its stabilizers: system text first, tools first."""
    most_without: tuple[float, float] = (1.0, 1.0)
    only_reasoning: bool = False
    """Whether only templates that drop old reasoning lose anything."""
    nothing_to_do: str = ""
    """Why no rewrite helps, if none does."""


ROWS = (
    Row(
        claude_code.m1_billing_line_of_another_session(),
        "billing line differs by session",
        "0.1 % / 65 %, then 99.8 %",
        (0.99, 0.99),
        (0.01, 0.75),
    ),
    Row(
        claude_code.m2_nonce_in_every_request(),
        "nonce in the billing line",
        "0.1 % where it is not masked; llama-server masks it",
    ),
    Row(
        claude_code.m3_system_message_in_a_tool_loop(),
        "system message in mid-conversation",
        "strict templates refuse it",
    ),
    Row(
        claude_code.m4_environment_behind_the_prompt(),
        "environment behind the user's text",
        "80-82 %, then 99.8 %",
        (0.99, 0.99),
        (0.84, 0.84),
    ),
    Row(
        claude_code.m5_another_git_status(),
        "another git status",
        "79 %, then 98.3 %",
        (0.98, 0.98),
        (0.84, 0.84),
    ),
    Row(
        claude_code.m6_another_folder(),
        "another folder",
        "7 % / 73 %",
        (0.05, 0.7),
        (0.08, 0.8),
        nothing_to_do="the model needs the path",
    ),
    Row(
        claude_code.m7_old_reasoning_dropped(),
        "old reasoning dropped at a new user message",
        "87.6 %, then 100 %",
        most_without=(0.9, 0.9),
        only_reasoning=True,
    ),
    Row(
        claude_code.m8_calls_sent_back_changed(),
        "tool calls sent back changed",
        "the generated part is lost",
        most_without=(0.95, 0.95),
    ),
    Row(
        claude_code.m9_tool_loaded_in_mid_conversation(),
        "tool loaded in mid-conversation",
        "38 % / 25 %, then 78 % / 64 %",
        (0.77, 0.64),
        (0.41, 0.3),
    ),
    Row(claude_code.m10_request_to_compact(), "request to compact", "100 %"),
    Row(
        claude_code.m10_conversation_after_compaction(),
        "conversation after compaction",
        "tools and system prompt, once the billing line is gone",
        (0.6, 0.6),
        (0.01, 0.7),
    ),
    Row(
        claude_code.m11_stream_cut_by_the_server(),
        "stream cut by the server",
        "all but the last character of the prompt",
    ),
    Row(
        claude_code.m12_other_features(),
        "other features switched on",
        "0 % system first",
        (0.0, 0.6),
        (0.01, 0.75),
        nothing_to_do="it is another system prompt",
    ),
    Row(
        claude_code.m13_text_beside_a_tool_result(),
        "text beside a tool result",
        "rendered before the result; it begins a new turn",
        (0.9, 0.9),
    ),
    Row(claude_code.m13_text_glued(), "the same, glued to the result", "100 %"),
    Row(claude_code.tool_loop(), "Claude Code: next step of a tool loop", "100 % (45 of 45)"),
    Row(
        opencode.o1_date_at_midnight(),
        "date in the system prompt",
        "27-29 % / only tools and system prompt",
        most_without=(0.29, 0.82),
    ),
    Row(
        opencode.o2_another_folder(),
        "another folder",
        "27-29 % / 97 %",
        (0.25, 0.95),
        (0.3, 0.99),
        nothing_to_do="the model needs the path",
    ),
    Row(
        opencode.o3_other_rules(),
        "other rules of the project",
        "as another folder",
        (0.25, 0.95),
        (0.3, 0.99),
        nothing_to_do="the model is told something else",
    ),
    Row(
        opencode.o4_plan_to_build(),
        "tool text changes from plan to build",
        "45-48 % / 28-30 %",
        most_without=(0.7, 0.4),
    ),
    Row(
        opencode.o5_reminder_moves_to_the_newest_message(),
        "reminder moves to the newest message",
        "50 % of a long prompt",
        most_without=(0.75, 0.75),
    ),
    Row(
        opencode.o6_request_to_compact(),
        "request to compact",
        "0 %",
        (0.0, 0.0),
        (0.01, 0.01),
        nothing_to_do="another system prompt and no tools",
    ),
    Row(
        opencode.o6_conversation_after_compaction(),
        "conversation after compaction",
        "13 %: tools and system prompt",
        (0.6, 0.6),
        nothing_to_do="it is a new conversation; tools and system prompt are kept",
    ),
    Row(
        opencode.o7_old_results_cleared(),
        "old tool results cleared",
        "7 %",
        (0.7, 0.7),
        (0.85, 0.85),
        nothing_to_do="the client chose to forget; leave its pruning off",
    ),
    Row(
        opencode.o8_arguments_minified(),
        "arguments written differently",
        "100 % where the template writes them itself",
        most_without=(0.98, 0.98),
    ),
    Row(
        opencode.o8_call_refused_by_the_client(),
        "call renamed to `invalid`",
        "the call is lost",
        most_without=(0.98, 0.98),
    ),
    Row(
        opencode.o9_retry_after_a_cut_stream(),
        "retry after a cut stream",
        "the prompt is kept",
        nothing_to_do="nothing is lost but the partial answer",
    ),
    Row(
        opencode.o10_continued_session(),
        "continued session",
        "100 % as sent; old reasoning is dropped",
        most_without=(0.85, 0.85),
        only_reasoning=True,
    ),
    Row(
        opencode.o11_fresh_session(),
        "fresh session in the same folder",
        "99.8-99.9 %",
        (0.99, 0.99),
        nothing_to_do="nothing is lost but the user's text",
    ),
    Row(opencode.tool_loop(), "OpenCode: next step of a tool loop", "100 % (67 of 67)"),
)
