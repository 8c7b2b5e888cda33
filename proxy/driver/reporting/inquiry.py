"""Why one request reused what it did: what was known of its prompt, held against the reply.

Owns: when it looks. What other requests evaluate while this one runs was not there for it.
"""

import time

from proxy.core.explaining.causes import Cause, Part
from proxy.core.explaining.divergence import Change, Seen, find_change
from proxy.core.explaining.explain import SLACK_TOKENS, Past, Served, judge, may_be_missed
from proxy.core.explaining.known_prompts import KnownPrompt, Sighting
from proxy.core.explaining.records import Divergence, Nearest
from proxy.core.explaining.sketch import EMPTY, begin_alike, compare, have_same_first_message
from proxy.core.model import Prompt
from proxy.driver.contact.attachment import Attachment
from proxy.driver.reporting.journal import Journal, Keep
from proxy.driver.reporting.report import Findings
from proxy.driver.serving.account import Account
from proxy.upstream.bodies import GenerationBody
from proxy.upstream.sketches import Contents, sketch_of

_N_CHARACTERS = 80
"""About 20 tokens."""
_N_IDS = 8


class Inquiry:
    """Looks into one request whose prompt is known; *body* is in the chat form if it has messages."""

    def __init__(
        self, journal: Journal, attachment: Attachment, prompt: Prompt, body: GenerationBody
    ) -> None:
        self._journal = journal
        self._known = journal.prompts
        self._attachment = attachment
        self._prompt = prompt
        self._body = body
        self._sighting = Sighting()
        self._seen = Seen(EMPTY)
        self._old_text = ""
        self._is_same_conversation = False
        self._planned_at = time.monotonic()

    def note_planned(self) -> None:
        """Look what is known of the prompt now."""
        self._planned_at = time.monotonic()
        if self._journal.keep is not Keep.NONE:
            self._sighting = self._known.look_up(self._prompt.namespace, self._prompt.tokens)

    def findings(self, account: Account, request_id: str) -> Findings:
        """Return why no more was reused, once that is known; the prompt is known from now on."""
        if account.n_reused is None:
            return Findings(account)
        if self._journal.keep is not Keep.NONE:
            text = self._prompt.text if self._journal.keep is Keep.TEXT else ""
            self._seen = Seen(sketch_of(self._body), text)
        partner = self._partner()
        n_with_partner = self._common(partner)
        served = self._served(account, account.n_reused)
        past = self._past(partner, n_with_partner)
        change = None
        if partner is not None and served.failure is None and may_be_missed(served, past):
            change = self._change(partner, n_with_partner)
            past = self._past(partner, n_with_partner, change)
        verdict = judge(served, past, change)
        findings = Findings(
            account,
            cause=verdict.cause,
            n_missed=verdict.n_missed,
            is_at_divergence=change is not None and verdict.cause is change.cause,
            nearest=self._nearest(partner, n_with_partner, served),
            divergence=self._divergence(partner, n_with_partner, change),
        )
        if account.failure is not Cause.TOKENIZED_OTHERWISE:
            self._remember(request_id)
        return findings

    def _partner(self) -> KnownPrompt | None:
        """Return the prompt to hold this one against: of the same conversation, or else the nearest."""
        if self._journal.keep is Keep.NONE:
            return None
        nearest = self._sighting.nearest
        if nearest is not None and not self._known.is_known(nearest):
            nearest = None
        found = self._known.of_conversation(self._prompt.namespace, self._seen.sketch, nearest)
        if found is not None and found.ended_at < self._planned_at:
            self._is_same_conversation = True
            return nearest if nearest and self._is_closer(nearest, found) else found
        if nearest is not None:
            self._is_same_conversation = begin_alike(self._seen.sketch, nearest.sketch)
        return nearest

    def _is_closer(self, nearest: KnownPrompt, found: KnownPrompt) -> bool:
        """Return whether the same messages were begun again since, under a header more like this one."""
        return (
            nearest.ended_at > found.ended_at
            and have_same_first_message(self._seen.sketch, nearest.sketch)
            and self._sighting.n_common > self._known.common(found, self._prompt.tokens)
        )

    def _common(self, partner: KnownPrompt | None) -> int:
        if partner is None:
            return 0
        if partner is self._sighting.nearest:
            return self._sighting.n_common
        return self._known.common(partner, self._prompt.tokens)

    def _served(self, account: Account, n_reused: int) -> Served:
        plan = account.plan
        return Served(
            self._attachment.rule,
            plan.why,
            self._prompt.n_tokens,
            n_reused,
            plan.start.n_reused,
            plan.n_shared,
            plan.n_in_use,
            account.failure,
        )

    def _past(
        self, partner: KnownPrompt | None, n_with_partner: int, change: Change | None = None
    ) -> Past:
        nearest = self._sighting.nearest
        is_of_other = nearest is not None and nearest.process_id != self._attachment.process_id
        n_like = 0
        if partner is not None:
            # What follows a change in the newest message is new in any case.
            is_newest = change is not None and change.message == len(self._seen.sketch.messages) - 1
            n_both = min(partner.n_tokens, self._prompt.n_tokens - 1)
            n_like = n_with_partner if is_newest else n_both
        return Past(self._sighting.n_common, n_like, is_of_other, self._sighting.loss)

    def _change(self, partner: KnownPrompt, n_with_partner: int) -> Change | None:
        """Return where the prompt leaves another one; None if it goes on from it, or is part of it."""
        sketch, old = self._seen.sketch, partner.sketch
        n_ends = min(partner.n_tokens, self._prompt.n_tokens) - SLACK_TOKENS
        if n_with_partner >= n_ends and (compare(sketch, old).is_none or not sketch.messages):
            return None
        self._old_text = self._known.text(partner)
        new = Seen(sketch, self._seen.text, Contents(self._body))
        return find_change(
            new,
            Seen(old, self._old_text),
            is_same_conversation=self._is_same_conversation,
        )

    def _nearest(
        self, partner: KnownPrompt | None, n_with_partner: int, served: Served
    ) -> Nearest | None:
        if partner is not None:
            age_seconds = round(self._planned_at - partner.ended_at, 3)
            return Nearest(
                kind="request",
                n_common=n_with_partner,
                id=partner.id,
                n_tokens=partner.n_tokens,
                age_seconds=age_seconds,
            )
        return Nearest(kind="state", n_common=served.n_shared) if served.n_shared else None

    def _divergence(
        self, partner: KnownPrompt | None, n_common: int, change: Change | None
    ) -> Divergence | None:
        if partner is None or change is None or change.part is Part.NOWHERE:
            return None
        before, known, now = self._texts(change)
        return Divergence(
            n_common=n_common,
            part=change.part,
            message=change.message,
            before=before,
            known=known,
            now=now,
            known_ids=tuple(self._known.tokens_at(partner, n_common, _N_IDS)),
            now_ids=tuple(self._prompt.tokens[n_common : n_common + _N_IDS]),
        )

    def _texts(self, change: Change) -> tuple[str, str, str]:
        if change.at is None:
            return "", "", ""
        new, old, at = self._seen.text, self._old_text, change.at
        end = at + _N_CHARACTERS
        return new[max(0, at - _N_CHARACTERS) : at], old[at:end], new[at:end]

    def _remember(self, request_id: str) -> None:
        if self._journal.keep is not Keep.NONE:
            self._known.add(
                request_id,
                self._prompt.namespace,
                self._prompt.tokens,
                self._seen.text,
                self._seen.sketch,
                self._attachment.process_id,
                time.monotonic(),
            )
