"""What a reply says of its request's plan, and of what the slot holds now.

A hit is what the reply confirms. Less than a restore promised quarantines the checkpoint; more than the
slot was known to hold is drift, and the slot is erased before its next use.
"""

from contextlib import suppress

from proxy.core.degradation import DegradationKind
from proxy.core.explaining.causes import Cause
from proxy.core.model import Checkpoint, Prompt
from proxy.core.planning.evaluation import after_evaluation
from proxy.core.planning.options import Restore
from proxy.core.planning.plan import Plan
from proxy.core.slots import TAINTED, Content, Unknown, restored_tokens
from proxy.driver.contact.attachment import Attachment
from proxy.driver.requests import Answer
from proxy.driver.services import Services
from proxy.driver.serving.account import Account
from proxy.errors import StoreFault
from proxy.log import get_logger
from proxy.upstream.replies import Timings


class Confirmation:
    """Holds one request's reply against its plan."""

    def __init__(
        self, services: Services, attachment: Attachment, request_id: str, prompt: Prompt
    ) -> None:
        self._services = services
        self._attachment = attachment
        self._request_id = request_id
        self._prompt = prompt

    def settle(self, plan: Plan, answer: Answer, account: Account) -> None:
        """Hold the reply against the plan, and record what the slot holds now."""
        table = self._attachment.desk.table
        before = table[plan.slot_id].content
        held: Content = Unknown(self._prompt.namespace, n_restored=restored_tokens(before))
        if answer.timings is None and 400 <= answer.status < 500:
            return  # refused before the slot was touched (server-context.cpp, send_error at launch)
        if answer.timings is not None:
            account.add(answer.timings)
            held = self._held(before, answer.timings, account)
        table.set_content(plan.slot_id, held)

    def _held(self, before: Content, timings: Timings, account: Account) -> Content:
        prompt, namespace = self._prompt, self._prompt.namespace
        if timings.cache_n + timings.prompt_n != prompt.n_tokens:
            account.failure = Cause.TOKENIZED_OTHERWISE
            self._disagree(timings)
            return Unknown(namespace, n_restored=restored_tokens(before))
        self._confirm(account)
        if account.is_drift and not self._attachment.clears_idle_slots:
            return TAINTED
        if prompt.n_tokens + timings.predicted_n >= self._attachment.n_ctx:
            # At the end of the context it may have been shifted: such states are not exact.
            return TAINTED
        self._attachment.learn_evaluation(timings)
        return after_evaluation(
            before,
            prompt.tokens,
            namespace,
            cuts=account.plan.cuts,
            n_generated=timings.predicted_n,
            shape=prompt.shape,
            n_believed=self._attachment.n_believed_points,
        )

    def _disagree(self, timings: Timings) -> None:
        self._services.metrics.tokenization_disagreements.inc()
        self._attachment.disable_shape(self._prompt.shape)
        get_logger("cache").warning(
            "tokenization disagreement: requests of this shape are served uncached",
            id=self._request_id,
            shape=self._prompt.shape,
            n_predicted=self._prompt.n_tokens,
            n_really=timings.cache_n + timings.prompt_n,
        )

    def _quarantine(self, checkpoint: Checkpoint) -> None:
        store, namespace = self._services.store, self._prompt.namespace
        store.quarantine(checkpoint)
        with suppress(StoreFault):  # only an explanation would be the poorer
            tokens = store.index.tokens(checkpoint.id)
            self._services.journal.note_loss(namespace, tokens, Cause.RESTORE_NOT_REUSED)

    def _confirm(self, account: Account) -> None:
        metrics, start = self._services.metrics, account.plan.start
        if account.n_restored and not account.is_ineffective_restore:
            self._attachment.recover(DegradationKind.RESTORES_NOT_REUSED)
        if account.is_ineffective_restore and isinstance(start, Restore):
            self._attachment.degrade(
                DegradationKind.RESTORES_NOT_REUSED,
                f"{account.n_reused} of {start.n_reused} tokens of {start.checkpoint.file_name}",
            )
            metrics.restore_ineffective.inc()
            account.failure = Cause.RESTORE_NOT_REUSED
            self._attachment.n_contradictions += 1
            if not self._attachment.desk.is_closed:
                self._quarantine(start.checkpoint)
            get_logger("cache").warning(
                "a restore was not reused: the checkpoint is quarantined",
                id=self._request_id,
                expected=start.n_reused,
                confirmed=account.n_reused,
                file=start.checkpoint.file_name,
            )
        # A server that clears idle slots puts them into its RAM cache, and brings prompts back from there.
        if account.is_drift and not self._attachment.clears_idle_slots:
            metrics.drift.inc()
        if account.is_short:
            metrics.live_reuse_short.inc()
