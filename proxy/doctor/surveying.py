"""One survey: every llama-server that `upstream` names is examined, one after the other.

Nothing is tried out, and no model loaded, while a proxy uses the directory: that is asked instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from proxy.doctor.directory import FreeBytes, ProbeFiles, examine_directory, free_bytes_of
from proxy.doctor.examination import Examination
from proxy.doctor.facts import Facts
from proxy.doctor.hosts import Note, Reached, reach
from proxy.doctor.running_proxy import ask_proxy
from proxy.doctor.survey_facts import SettingsFacts, Survey
from proxy.driver.saving.saver import RewriteStateFile, keep_as_saved
from proxy.errors import StoreLocked
from proxy.store.budget import Limits
from proxy.store.inspection import keep_proxies_out
from proxy.upstream.llama_server import LlamaServer


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is to be examined; `admin` is where a proxy would answer operators, HOST:PORT."""

    roots: Sequence[LlamaServer]
    has_key: bool
    directory: Path
    admin: str
    limits: Limits
    settings: SettingsFacts = SettingsFacts()


class Surveying:
    """Surveys one subject, once."""

    def __init__(
        self,
        subject: Subject,
        *,
        rewrite: RewriteStateFile = keep_as_saved,
        free_bytes: FreeBytes = free_bytes_of,
        note: Note = lambda text: None,
    ) -> None:
        """Prepare; *note* is told what is going on, *rewrite* and *free_bytes* are for tests."""
        self._subject = subject
        self._rewrite = rewrite
        self._free_bytes = free_bytes
        self._note = note

    async def run(self) -> Survey:
        """Return all facts; raises nothing that a person could mend."""
        subject = self._subject
        try:
            with keep_proxies_out(subject.directory):
                return await self._survey(may_probe=True)
        except StoreLocked as lock:
            session = subject.roots[0].session
            proxy = await ask_proxy(session, subject.admin, str(lock))
        survey = await self._survey(may_probe=False)
        servers = tuple(replace(facts, proxy=proxy) for facts in survey.llama_servers)
        return replace(survey, llama_servers=servers, proxy=proxy)

    async def _survey(self, *, may_probe: bool) -> Survey:
        subject, files = self._subject, ProbeFiles(self._subject.directory)
        self._note("asking llama-server what it is")
        asked_for = subject.settings.asked_for
        reached = [
            await reach(root, asked_for, may_load=may_probe, note=self._note)
            for root in subject.roots
        ]
        survey = Survey(
            directory=examine_directory(files, subject.limits, self._free_bytes),
            llama_servers=(),
            hosts=tuple(each.host for each in reached if each.host is not None),
            settings=subject.settings,
        )
        for each in reached:
            for upstream in each.upstreams:
                facts = await self._examine(upstream, each, survey, files, may_probe=may_probe)
                survey = replace(survey, llama_servers=(*survey.llama_servers, facts))
        return survey

    async def _examine(
        self,
        upstream: LlamaServer,
        reached: Reached,
        survey: Survey,
        files: ProbeFiles,
        *,
        may_probe: bool,
    ) -> Facts:
        is_one_of_several = len(self._subject.roots) > 1 or reached.host is not None
        examination = Examination(
            upstream,
            survey.directory,
            files,
            host="" if reached.host is None else reached.host.kind,
            name=upstream.target.name if is_one_of_several else "",
            has_key=self._subject.has_key,
            rewrite=self._rewrite,
            note=self._note,
        )
        return await examination.run(may_probe=may_probe)
