"""Templates of real models whose prompts are not like those of the lab's."""

from pathlib import Path

import pytest

from tests.lab.conversation import system, tools, user
from tests.lab.models import TEMPLATE_FOLDER
from tests.live.conftest import StartRig

MARKS_KEPT_WHOLE = (
    (TEMPLATE_FOLDER / "plain.jinja")
    .read_text()
    .replace("<|im_start|>", "<tool_call>")
    .replace("<|im_end|>", "</tool_call>")
)
"""Marks that are one token also where special tokens are ordinary text, as those of gpt-oss."""
TOOLS_IN_USER_MESSAGE = """
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\n' -}}
    {%- if tools and message.role == 'user' and loop.index0 < 2 -%}
        {%- for tool in tools -%}
            {{- tool | tojson + '\n\n' -}}
        {%- endfor -%}
    {%- endif -%}
    {{- message.content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' -}}
{%- endif -%}
"""
"""As that of Llama 3.3."""


@pytest.mark.parametrize("template", [MARKS_KEPT_WHOLE, TOOLS_IN_USER_MESSAGE])
async def test_second_session_evaluates_only_its_own_message(
    start_rig: StartRig, tmp_path: Path, template: str
) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(template)
    flags = ("--chat-template-file", str(path), "--skip-chat-parsing")
    async with start_rig("hybrid", n_slots=1, extra_args=flags) as rig:
        first = await rig.chat([system(300), user(1, 300)], tools=tools(4))
        await rig.restart()
        before = await rig.evaluated()
        messages = [system(300), user(2, 300)]
        await rig.chat(messages, tools=tools(4))
        assert await rig.evaluated() - before < 0.4 * first["usage"]["prompt_tokens"]
        messages += [{"role": "assistant", "content": "It is mended."}, user(3)]
        await rig.chat(messages, tools=tools(4))
        assert rig.running.pool.processes[0].reader.known.n_spliced
