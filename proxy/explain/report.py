"""Reporting each generation request once it has ended: a log line, counts, and an explanation.

*Inquiry* finds out why a request reused no more. *Report* logs and counts the request. *Journal* remembers
the last requests, in memory only.
"""

import asyncio
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Collection
from dataclasses import replace
from datetime import date, datetime
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import xxhash

from proxy.core.messages import Chat, Kind, chat_asked, kind_of
from proxy.core.model import Outcome, Prompt, tenant_namespace
from proxy.core.plan import most_useful
from proxy.core.rates import seconds_in_words
from proxy.errors import NotKnown, ProxyError, ProxyStopped, ServerAway, TooManyRequests
from proxy.explain import sketch, views
from proxy.explain.causes import Cause
from proxy.explain.compare import Rendering
from proxy.explain.judgement import NOT_JUDGED, Account, Judgement, diagnostics, judge_prompt
from proxy.explain.known import SLACK_TOKENS, KnownPrompt, KnownPrompts, Matches
from proxy.llama.requests import GenerationBody, asked_comparison
from proxy.log import get_logger
from proxy.metrics import Metrics
from proxy.store.known_models import known_tenants

if TYPE_CHECKING:
    from proxy.serving.process import Process
    from proxy.serving.request import Request

TOKENIZED_OTHERWISE = "requests of this shape are tokenized differently"
MAX_REQUESTS = 2000
MAX_PROMPTS = 500
MAX_PROMPT_BYTES = 48 << 20
MAX_CHATS = 256
_MAX_OTHERS = 16
"""The states of so many other tenants are searched for tokens that a request missed."""
LAST, MISS = "last", "miss"
_N_DIGITS, _N_MODEL = 8, 200


Keep = Literal["none", "tokens", "text"]
"""How much of prompts is kept to explain later requests."""


class Told(NamedTuple):
    """The additions to a client's answer: a header, and diagnostics in JSON, empty unless asked for.

    The header X-Prefix-Cache tells the plan, because llama-server's own counts come later.
    """

    header: str = ""
    diagnostics: bytes = b""


def sums_at(today: views.Today, now: float) -> views.Today:
    """Return the sums of the day that *now* lies in, in local time; those of a new day start at zero."""
    day = date.fromtimestamp(now)
    midnight = datetime(day.year, day.month, day.day).timestamp()
    return today if today.since >= midnight else views.Today(since=midnight)


class Journal:
    """Remembers requests that have ended, and the newest prompts as far as *keep* allows.

    `past` is what outlives the proxy, `in_flight` are the requests that have not ended. The stabilizers in
    `switched_on` are in force.
    """

    def __init__(self, keep: Keep = "text", switched_on: Collection[str] = ()) -> None:
        self._ended: OrderedDict[str, tuple[views.RequestRecord, Judgement]] = OrderedDict()
        self.keep = keep
        self._switched_on = switched_on
        self.prompts = KnownPrompts(MAX_PROMPT_BYTES, 0 if keep == "none" else MAX_PROMPTS)
        self.past = views.History(today=views.Today(since=time.time()))
        self.in_flight: dict[str, Request] = {}
        self._chats: deque[Chat] = deque(maxlen=MAX_CHATS)
        self.traced: deque[views.TracedRequest] = deque(maxlen=MAX_REQUESTS)
        self.n_recorded = 0
        """How many requests have ended since the proxy was started; it changes with every new record."""

    def add(self, record: views.RequestRecord, judgement: Judgement = NOT_JUDGED) -> None:
        """Remember a request that has just ended; the oldest one may be forgotten for it."""
        self._ended[record.id] = record, judgement
        self.n_recorded += 1
        self.today()
        if record.kind is not Kind.AHEAD and record.client != views.OWN_CLIENT:
            self.past.add(record)
        if len(self._ended) > MAX_REQUESTS:
            self._ended.popitem(last=False)

    def today(self) -> views.Today:
        """Return what the requests of this day have reused."""
        self.past.today = sums_at(self.past.today, time.time())
        return self.past.today

    def shown(self, text: str) -> str:
        """Return a text, such as a conversation's first words, if text is kept."""
        return text if self.keep == "text" else ""

    def note_chat(self, request: "Request") -> None:
        """Set the kind of a request: its role in its conversation, if its messages were read."""
        if request.kind or request.conversation is None or request.chat is None:
            return
        fields, words = request.chat.fields, self.shown(request.words)
        # Behind a host of models, another model has not seen what this client has asked one of them.
        of_model = request.namespace + request.tenant
        asker, has_tools = (of_model, request.session), bool(fields.get("tools"))
        text = partial(sketch.said_in, fields) if words and not has_tools else str
        chat = chat_asked(asker, request.conversation, has_tools=has_tools)
        request.kind = kind_of(chat, reversed(self._chats), text)
        self._chats.append(chat._replace(kind=request.kind, words=words.rstrip("…")))

    def latest(
        self, limit: int, *, conversation: str = "", client: str = "", only_misses: bool = False
    ) -> list[views.RequestRecord]:
        """Return the last requests, the newest first; of one conversation or client only, if given."""
        found = (
            record
            for record, _ in reversed(self._ended.values())
            if (record.cause.is_miss or not only_misses)
            and conversation in ("", record.conversation)
            and client in ("", record.client)
        )
        return list(islice(found, max(0, limit)))

    def explain(self, request_id: str) -> views.Explanation:
        """Return the explanation of a request by its id, of the last one or of the last miss.

        Raises NotKnown if there is none.
        """
        newest, found = reversed(self._ended.values()), self._ended.get(request_id)
        if request_id == LAST:
            # A command's own requests are meant only if there are no others.
            clients = (each for each in newest if each[0].kind is not Kind.AHEAD)
            found = min(clients, key=lambda each: each[0].client == views.OWN_CLIENT, default=None)
        elif request_id == MISS:
            found = next((each for each in newest if each[0].cause.is_miss), None)
        if found is None:
            raise NotKnown(self._why_unknown(request_id))
        record, judgement = found
        cause, is_same = record.cause, judgement.is_same_conversation
        return views.Explanation(
            request=record,
            says=cause.says,
            cure=cause.cure_for(record.part, self._switched_on, is_same_conversation=is_same),
            nearest=judgement.nearest,
            divergence=judgement.divergence,
        )

    def with_costs(self, found: views.Explanation) -> views.Explanation:
        """Return an explanation with the cost of each part of its prompt, as long as the prompt is kept.

        If no known prompt begins alike, no part is marked as new.
        """
        known, nearest = self.prompts.find(found.request.id), found.nearest
        if known is None or not (n_prompt := found.request.n_prompt):
            return found
        old, n_known = known.sketch, n_prompt
        if nearest and nearest.n_common > SLACK_TOKENS:
            other = self.prompts.find(nearest.id) if nearest.id else None
            old = other.sketch if other else old
            n_known = (nearest.n_tokens or 0) if other else nearest.n_common
        # Of a prompt with images only the tokens before the first one are known.
        n_whole = max(n_prompt, len(known.tokens))
        costs = sketch.costs_of(known.sketch, n_whole, n_prompt, old, n_known)
        return msgspec.structs.replace(found, costs=costs)

    def _why_unknown(self, request_id: str) -> str:
        if request_id == LAST:
            return "no request has ended since the proxy was started"
        if request_id == MISS:
            return f"no miss is among the last {len(self._ended):,} requests since the proxy was started"
        return (
            f"no request {request_id} is known: its answer has not ended yet, it is not among the last "
            f"{MAX_REQUESTS:,}, or the proxy was restarted since"
        )


_Found = tuple[Judgement, KnownPrompt, Matches]
"""The judgement on a request, its prompt to be kept, and the known prompts that it was judged by."""


class Inquiry:
    """Finds out why one request reused no more; *body* is in the chat form if it has messages.

    An inquiry is made when the request has been planned: it does not count prompts that other requests
    evaluate later. A request that continues in the slot of its conversation is not compared.
    """

    def __init__(self, process: "Process", prompt: Prompt, body: GenerationBody) -> None:
        self._process, self._prompt, self._body = process, prompt, body
        self._journal, self._planned_at = process.journal, time.monotonic()
        self._known = self._journal.prompts.newest()
        running = (p for p in process.served.values() if not p.queue.is_closed)
        self._leased = {p.id: {s.id for s in p.slots if s.is_leased} for p in running}
        self._found: tuple[object, _Found] | None = None

    def foresee(self, account: Account, request_id: str) -> Judgement:
        """Return the judgement on a request of which only the plan is known; its client may be told."""
        if account.n_reused is None:
            account = replace(account, n_reused=account.plan.start.n_reused)
        return self._find(account, request_id)[0]

    def judge(self, account: Account, request_id: str) -> Judgement:
        """Return why no more was reused, once the reuse is known, and add the prompt to the known ones."""
        if account.n_reused is None:
            return Judgement(Cause.NOT_ANSWERED)
        judgement, new, matches = self._find(account, request_id)
        new.ended_at = time.monotonic()  # it may have been found when the answer began
        judgement = self._beside_others(judgement, account)
        if account.failure is not Cause.TOKENIZED_OTHERWISE:
            if self._journal.keep != "text":
                new.rendering.reduce()
            self._journal.prompts.add(new, matches)
        nearest = views.nearest_of(matches[1], account.plan.n_shared, self._planned_at)
        # A stored state has no text: where the prompt leaves another prompt says nothing of it.
        where = judgement.divergence if nearest and nearest.id else None
        return msgspec.structs.replace(judgement, nearest=nearest, divergence=where)

    def _find(self, account: Account, request_id: str) -> _Found:
        """Return the findings; they are computed again only if the outcome differs from the plan.

        A prompt that continues the last prompt of its slot, and reuses all of that, is not compared.
        """
        facts = account.plan, account.n_reused, account.failure
        if self._found is not None and self._found[0] == facts:
            return self._found[1]
        prompt, known, plan = self._prompt, self._journal.prompts, account.plan
        rendering = Rendering(self._body.fields, self._journal.shown(prompt.text))
        slot, now = (self._process.id, plan.slot_id), time.monotonic()
        new = KnownPrompt(prompt.namespace, prompt.tokens, rendering, slot, now, (request_id,))
        n_reused = account.n_reused or 0
        is_plain = account.failure is None and not account.n_restored
        is_all_reused = is_plain and plan.n_shared <= n_reused + SLACK_TOKENS
        if is_all_reused and (last := known.continued(new, n_reused)):
            found: _Found = Judgement(Cause.HIT), new, (last, last)
        else:
            matches = known.matches(new, self._known, self._planned_at)
            judgement = judge_prompt(new, matches, account, self._process.rule, self._leased)
            found = judgement, new, matches
        self._found = facts, found
        return found

    def _beside_others(self, judgement: Judgement, account: Account) -> Judgement:
        """Return the judgement, or OTHER_KEY if states of another API key have more of the prompt.

        It replaces only a judgement that explains nothing, and only operators see it: the client must not
        learn what the users of another key have sent.
        """
        n_reused = account.n_reused or 0
        is_open = judgement.cause in (Cause.HIT, Cause.FIRST_SIGHT)
        is_explained = not is_open or account.n_prompt - n_reused <= SLACK_TOKENS
        if is_explained or self._process.opened_store is None or not self._process.can_cache:
            return judgement
        process, prompt, model = self._process, self._prompt, self._process.model_namespace
        tenants = {b"", *known_tenants(process.store.index, model)}
        others = {tenant_namespace(model, tenant) for tenant in tenants} - {prompt.namespace}
        found = (process.store.find(other, prompt.tokens) for other in islice(others, _MAX_OTHERS))
        n_known = (most_useful(process.rule, each, prompt.n_tokens)[0] for each in found)
        n_missed = max(n_known, default=0) - n_reused
        if n_missed <= SLACK_TOKENS:
            return judgement
        return msgspec.structs.replace(judgement, cause=Cause.OTHER_KEY, n_missed=n_missed)


class Report:
    """Reports the outcome of requests, without any of their text in the log."""

    def __init__(self, metrics: Metrics, journal: Journal) -> None:
        self._metrics = metrics
        self._journal = journal
        self._log = get_logger("cache")

    def told(self, request: "Request") -> Told:
        """Return the additions to an answer that begins now; a fault here does not stop the answer."""
        try:
            foreseen, route, n_reused = request.foresee(), request.route, 0
            header = f"cause={foreseen.cause.replace(' ', '-')}"
            if (account := request.account) is not None:
                n_reused = account.n_expected
                is_open = request.extends or (request.prompt and request.prompt.is_before_media)
                n_evaluated = "" if is_open else f"evaluated={account.n_prompt - n_reused} "
                header = f"reused={n_reused} {n_evaluated}{header}"
            named = asked_comparison(route, request.body) if request.body else None
            if named is None:
                return Told(header)
            # The first request of a conversation asks for diagnostics, too, but names no earlier answer.
            found = diagnostics(route, foreseen, n_reused) if named else None
            return Told(header, msgspec.json.encode(found))
        except Exception as error:
            self._log.warning("explain failed", id=request.id, reason=repr(error))
            return Told()

    def not_looked_up(
        self, request: "Request", why: str, outcome: Outcome = Outcome.BYPASS
    ) -> None:
        """Report a request that was not looked up, and *why*, once its answer was relayed."""
        # If the request was planned before its prompt was read, the plan says nothing of this prompt.
        request.why, request.account = why, None
        cause = Cause.TOKENIZED_OTHERWISE if why == TOKENIZED_OTHERWISE else Cause.NOT_LOOKED_UP
        self.answered(request, Judgement(cause), outcome)

    def answered(
        self, request: "Request", judgement: Judgement, outcome: Outcome = Outcome.BYPASS
    ) -> None:
        """Report a request once its answer was relayed; *outcome* counts if the request has no account."""
        answer, account = request.answer, request.account
        assert answer is not None
        facts: dict[str, Any] = {"why": request.why}
        if account is not None:
            outcome, facts = account.outcome, account.describe()
            self._count(account)
        if answer.status >= 400:
            judgement = Judgement(Cause.REFUSED)
            outcome = Outcome.REFUSED if answer.status < 500 else Outcome.FAILED
            facts["why"] = answer.complaint
        if answer.is_broken:
            return self.unanswered(request, ServerAway("llama-server went away in mid-answer"))
        self._metrics.requests.labels(outcome).inc()
        if judgement.cause.is_miss:
            self._metrics.misses.labels(judgement.cause, judgement.part).inc()
            self._metrics.missed_tokens.labels(judgement.cause).inc(judgement.n_missed)
        if request.prompt and answer.timings and self._journal.keep != "none":
            n_answer = answer.timings.predicted_n
            self._journal.traced.append(views.traced(request.at, request.prompt, n_answer))
        if answer.first_token_at is not None:
            seconds = answer.first_token_at - request.arrived_at
            self._metrics.first_token_seconds.labels(outcome).observe(seconds)
            facts["first_token_seconds"] = round(seconds, 4)
        restored = account.plan.start.restored if account else None
        is_fetched = restored is not None and restored.checkpoint.is_fetched
        earlier = "fetched for an earlier request" if is_fetched else None
        record = self._record(
            request,
            outcome.value,
            judgement,
            status=answer.status,
            server=request.server or None,
            rewrites=request.rewrites or None,
            shared=request.shared or earlier,
            **facts,
        )
        self._log.info("request", **views.line_of(record), says=views.in_words(record))
        self._journal.add(record, judgement)

    def _count(self, account: Account) -> None:
        """Count the tokens and seconds of a request."""
        metrics = self._metrics
        metrics.prompt_tokens.labels("reused").inc(account.n_reused or 0)
        metrics.prompt_tokens.labels("evaluated").inc(account.n_evaluated)
        metrics.restored_tokens.inc(account.n_restored)
        metrics.evaluation_seconds.inc(account.evaluation_seconds)
        metrics.queue_seconds.observe(account.queued_seconds)
        saved_seconds = account.saved_seconds or 0.0
        source = "restored" if account.n_restored else "live"
        metrics.saved_seconds.labels(source).inc(max(0.0, saved_seconds))
        metrics.lost_seconds.inc(max(0.0, -saved_seconds))

    def went_ahead(self, request: "Request", n_evaluated: int, seconds: float) -> None:
        """Report tokens of the next prompt that were evaluated after the answer to a request."""
        record = msgspec.structs.replace(
            self._record(request, Kind.AHEAD.value, NOT_JUDGED, evaluated=n_evaluated),
            id=secrets.token_hex(_N_DIGITS // 2),
            at=time.time() - seconds,
            kind=Kind.AHEAD,
            seconds=round(seconds, 4),
        )
        self._metrics.prompt_tokens.labels("evaluated").inc(n_evaluated)
        self._metrics.evaluation_seconds.inc(seconds)
        self._log.info("request", **views.line_of(record), says=views.in_words(record))
        self._journal.add(record)

    def unanswered(self, request: "Request", error: BaseException) -> None:
        """Report a request that *error* ended before its answer was whole."""
        why = next((why for kinds, why in _WHY_UNANSWERED if isinstance(error, kinds)), "other")
        self._metrics.unanswered_requests.labels(why).inc()
        record = self._record(request, "unanswered", Judgement(Cause.NOT_ANSWERED), why=why)
        write = self._log.warning if isinstance(error, ProxyError) else self._log.info
        api, took = views.api_name(record.path), seconds_in_words(record.seconds)
        says = f"{api}  not answered after {took}: {why}  id {record.id}"
        reason = str(error) or type(error).__name__
        write("request", **views.line_of(record), reason=reason, says=says)
        self._journal.add(record)

    def _record(
        self, request: "Request", outcome: str, judgement: Judgement, **facts: Any
    ) -> views.RequestRecord:
        return views.RequestRecord(
            id=request.id,
            at=request.at,
            path=request.path,
            outcome=outcome,
            cause=judgement.cause,
            kind=request.kind,
            **self.described(request),
            part=judgement.part,
            message=judgement.message,
            n_missed=judgement.n_missed,
            seconds=round((request.answered_at or time.monotonic()) - request.arrived_at, 4),
            **facts,
        )

    def described(self, request: "Request") -> dict[str, Any]:
        """Return the fields by which people recognize a request."""
        words = request.words
        tells_apart = repr((request.tenant, request.session, words)).encode()
        return {
            "title": self._journal.shown(words),
            "client": request.client,
            "model": sketch.shortened(request.model, _N_MODEL),
            "conversation": xxhash.xxh3_64_hexdigest(tells_apart)[:_N_DIGITS],
        }


_WHY_UNANSWERED: tuple[tuple[tuple[type[BaseException], ...], str], ...] = (
    ((asyncio.CancelledError, ConnectionResetError), "client left"),
    ((ServerAway,), "llama-server gone"),
    ((TooManyRequests,), "queue full"),
    ((ProxyStopped,), "proxy stopped"),
)
