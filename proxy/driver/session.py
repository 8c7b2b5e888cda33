"""One attached llama-server process and what serves requests for it."""

from dataclasses import dataclass

from proxy.driver.arrivals import Arrivals
from proxy.driver.attachment import Attachment
from proxy.driver.launches import Launches
from proxy.driver.prompts import PromptReader
from proxy.driver.slot_saves import SlotSaves
from proxy.driver.slot_work import SlotWork


@dataclass(frozen=True, slots=True)
class Session:
    """Everything that lives as long as one llama-server process does."""

    attachment: Attachment
    reader: PromptReader
    work: SlotWork
    saves: SlotSaves
    launches: Launches
    arrivals: Arrivals
