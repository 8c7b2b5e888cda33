"""What compose file and units give to llama-server is what the real one knows."""

import re

from proxy.core.launch import known_names, parse_help
from proxy.run.process import read_help
from tests.documents.files import REPOSITORY
from tests.lab.server import find_llama_server
from tests.unit.test_compose import EXAMPLE, SERVERS
from tests.unit.test_systemd import SERVER as SERVER_UNIT

SETTINGS = (REPOSITORY / "deploy" / "systemd" / "llama-server.env").read_text()


def test_llama_server_knows_every_flag_and_variable_that_it_is_given() -> None:
    told = read_help([str(find_llama_server())])
    commands = [service["command"] for service in SERVERS.values()]
    suggested = re.findall(r"^# More flags.*", EXAMPLE, re.M)
    flags = re.findall(
        r"(?<!\w)--[a-z-]+", " ".join([*commands, *suggested, *SERVER_UNIT["ExecStart"]])
    )
    assert {"--slot-save-path", "--ctx-size", "--n-gpu-layers", "--metrics"} <= set(flags)
    assert set(flags) - set(known_names(parse_help(told))) == set()
    variables = re.findall(r"LLAMA_ARG_\w+", SETTINGS)
    assert len(variables) == 6
    assert [name for name in variables if f"(env: {name})" not in told] == []
