"""The causes why known tokens of a prompt were evaluated again: a closed list, with cures in words.

Owns: the names. The list in docs/misses.md is made from this module.
"""

from collections.abc import Collection
from enum import StrEnum

from proxy.core.conditions import docstrings_of_fields


class Cause(StrEnum):
    """What decided how much of a prompt was reused.

    Below each cause stand its meaning and its cure. A third part names a stabilizer, and how it helps.
    """

    HIT = "hit"
    """All that was known of the prompt was reused.

    None needed.
    """
    FIRST_SIGHT = "first sight"
    """What was evaluated had not been seen before.

    None needed.
    """
    NOT_LOOKED_UP = "not looked up"
    """The prompt was not looked up. The plan says why; if /health names it, its cure stands there.

    See `why`: images, several completions, chats of some 100 tokens and the like are forwarded as they are.
    """
    REFUSED = "refused"
    """llama-server refused the request: its answer to the client was an error.

    Look at the answer that the client got, or at llama-server's log.
    """
    NOT_ANSWERED = "not answered to its end"
    """The answer ended before llama-server said how much it had reused.

    None if the client left. Else look at the answer that the client got, or at llama-server's log.
    """

    DATE = "date"
    """A date or a time of day in the prompt has changed.

    Take the time out of the system prompt and put it into the newest message.

    `sticky_date` lets a conversation keep the time that it began with; a new one has the new time.
    """
    SESSION = "session id"
    """An id, a time to the second, a temporary path or an address that names the session has changed.

    Have the client name its session behind what sessions share, or not at all.

    `sticky_session` leaves it out there and tells it in the newest message, from the third session on.
    """
    TOOL_ORDER = "tool order changed"
    """The same tools came in another order.

    Have the client sort its tools.

    `keep_tool_order` (it is one of the safe ones) keeps a conversation's first order.
    """
    TOOL_TEXT = "tool text changed"
    """A tool's description or parameters have changed.

    Keep what changes out of tool descriptions.

    `sticky_tool_text` lets a conversation keep the descriptions that it began with, but not the parameters.
    """
    TOOL_LIST = "tools added or removed"
    """Tools were added or removed.

    Load all tools from the beginning.

    `keep_tool_order` (it is one of the safe ones) puts later tools behind those known.
    """
    SYSTEM_TEXT = "system text changed"
    """The system prompt has changed; what follows it is as it was.

    None if the client works in another folder or mode now. What changes by itself (git status, digits in
    Claude Code's billing line) belongs at the end of the prompt, or into the newest message.
    """
    REMINDER = "reminder moved"
    """A reminder that the client adds was moved, changed or taken out.

    None if the client cannot leave its reminders where they are.

    `sticky_reminders` leaves them where they first were.
    """
    REASONING = "reasoning dropped"
    """The reasoning of an earlier answer is no longer in the prompt.

    Have the client send `reasoning_content` back.

    `inline_reasoning` puts the reasoning back into the answers.
    """
    EDITED_MESSAGE = "edited message"
    """An earlier message was edited, inserted or left out.

    None if the user went back, or if the client moves a note of its own, as goose does. Else switch off the
    client's pruning of old tool results.
    """
    TRUNCATED_HISTORY = "truncated history"
    """Messages at the beginning of the conversation were dropped or summed up.

    Give the client a context limit near that of llama-server, so that it compacts seldom.
    """
    RENDERED_OTHERWISE = "rendered otherwise"
    """The same messages are rendered otherwise by the chat template than before.

    Some templates move tools or system texts with each turn: try another template (--chat-template-file).
    """

    NO_STATE_THERE = "no state so far back"
    """Every state kept goes on beyond the place where the prompt ends or differs, and this model's memory
    cannot go back to any token.

    None needed: the next request that reaches this place finds a state there.
    """
    EVICTED = "state evicted"
    """The state was deleted to make room.

    More room: `max_store_bytes`, or free space on the disk. Or pin the checkpoint.
    """
    RESTART = "slot lost by a restart"
    """The slot that held it was lost when llama-server restarted.

    Lower `idle_save_seconds`; stop llama-server after the proxy, or start it by `run`.
    """
    NOT_KEPT = "state not kept"
    """Another request took the slot, and its state was not worth a file, or could not be written.

    Look at /health (saves fail, no room, write budget); more slots (-np) keep more conversations.
    """
    OTHER_KEY = "known under another API key"
    """A state of another API key or salt begins with this prompt; states are not shared between these.

    If both keys belong to one household, set `share_between_api_keys: true`. Give `warm` the key of the
    clients (`--api-key`).
    """
    IN_USE = "slot in use"
    """The state lies in a slot that another request was using.

    None needed; more slots (-np) if that happens often.
    """
    SLOT_HELD_LESS = "slot held less"
    """The slot held less than the proxy had left in it: another client used it past the proxy, or
    llama-server has emptied it or keeps fewer than 16 context checkpoints.

    Send all requests through the proxy, and start llama-server with --cache-ram 0 --ctx-checkpoints 16.
    """
    CHEAPER = "cheaper to evaluate"
    """A state was there, but by the speeds measured here evaluating was cheaper than using the state.

    None needed. A faster disk makes restores worth more.
    """
    RESTORE_REFUSED = "restore refused"
    """A checkpoint was not restored: llama-server refused it, or its file was gone, damaged or not read.

    Look at /health and llama-server's log; nobody else may write into slot_save_path. If the log says that
    states are damaged or were not read, look at the disk.
    """
    RESTORE_NOT_REUSED = "restore not reused"
    """llama-server restored a checkpoint and evaluated its tokens again.

    The checkpoint is not offered again. Report it if it keeps coming back.
    """
    ENDED_LLAMA_SERVER = "state ended llama-server"
    """llama-server ended while it used the state, which is therefore quarantined.

    None if llama-server was killed. Else report it, with the end of llama-server's log.
    """
    NOTHING_RESTORABLE = "nothing can be restored"
    """The state was lost with its slot; on this server nothing can be restored from a file.

    Look at /health and `llama-prefix-cache doctor`; more slots (-np) keep more conversations.
    """
    TOKENIZED_OTHERWISE = "tokenization disagreement"
    """llama-server made other tokens of the request than predicted, so requests of this shape are not
    cached.

    None; please report it, with the chat template and the fields of the request.
    """
    UNKNOWN = "unknown"
    """Nothing that is known explains it.

    Look at the difference. With `explain_keep: text` more causes can be told.
    """

    @property
    def is_miss(self) -> bool:
        """Whether tokens were evaluated that could have been reused."""
        return self not in _NO_MISSES

    @property
    def says(self) -> str:
        """The meaning in words."""
        return _WORDS[self.name][0]

    @property
    def stabilizer(self) -> str:
        """The name of the stabilizer that helps; empty if none does."""
        return "".join(_WORDS[self.name][2:]).partition(" ")[0].strip("`")

    @property
    def cure(self) -> str:
        """The cure if nothing is known of the request and the configuration."""
        _, advice, *helps = _WORDS[self.name]
        helper = f' Or add a stabilizer, --stabilizers "safe, {self.stabilizer}": '
        return helper.join([advice, *helps])

    def cure_for(
        self, part: "PromptPart", switched_on: Collection[str], *, is_same_conversation: bool
    ) -> str:
        """Return the cure for a request that differs in this *part* from the request compared with it."""
        advice, name = _WORDS[self.name][1], self.stabilizer
        is_known = is_same_conversation or name in _EVERYWHERE
        if not name or not is_known or (name == "sticky_date" and part not in _IN_FRONT):
            return advice
        if name in switched_on:
            why = f"`{name}` is on, but has not known this change, or not since the proxy was started."
            return f"{advice} {why}"
        return f"{self.cure} That helps from the next conversation on, not this one."


class PromptPart(StrEnum):
    """The parts of a prompt."""

    NOWHERE = "none"
    TOOLS = "tools"
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL_RESULT = "tool"
    TEXT = "text"


_NO_MISSES = (Cause.HIT, Cause.FIRST_SIGHT, Cause.NOT_LOOKED_UP, Cause.REFUSED, Cause.NOT_ANSWERED)
_WORDS = docstrings_of_fields(Cause)
_IN_FRONT = (PromptPart.TOOLS, PromptPart.SYSTEM, PromptPart.USER)
_EVERYWHERE = ("inline_reasoning", "sticky_session")
"""These stabilizers treat every conversation alike; the others hold the beginning of each."""
