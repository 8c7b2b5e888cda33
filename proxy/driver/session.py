"""One attached llama-server process and what serves requests for it."""

from dataclasses import dataclass

from proxy.driver.contact.attachment import Attachment
from proxy.driver.saving.slot_saves import SlotSaves
from proxy.driver.serving.prompts import PromptReader
from proxy.driver.slots.arrivals import Arrivals
from proxy.driver.slots.launches import Launches
from proxy.driver.slots.slot_work import SlotWork
from proxy.upstream.llama_server import LlamaServer


@dataclass(frozen=True, slots=True)
class Session:
    """Everything that lives as long as one llama-server process does."""

    upstream: LlamaServer
    attachment: Attachment
    reader: PromptReader
    work: SlotWork
    saves: SlotSaves
    launches: Launches
    arrivals: Arrivals
