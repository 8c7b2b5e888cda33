"""What users do with Anthropic's SDK."""

from typing import Any

from anthropic import AsyncAnthropic

from tests.lab.apis import MESSAGES
from tests.lab.conversation import agent_requests, system, tools
from tests.lab.sdks.observing import collect, first_events

Client = AsyncAnthropic
Fields = dict[str, Any]

LOOK = {
    "name": "look",
    "description": "Looks at it.",
    "input_schema": {
        "type": "object",
        "properties": {"deep": {"type": "boolean"}},
        "required": ["deep"],
        "additionalProperties": False,
    },
}
"""Its grammar leaves a random model little choice."""
THINK_BRIEFLY = {"type": "enabled", "budget_tokens": 4}
TOO_LONG = [{"role": "user", "content": "word " * 20_000}]


def hello(**fields: Any) -> Fields:
    return {
        "model": "local",
        "max_tokens": 24,
        "messages": [{"role": "user", "content": "hello"}],
        "extra_body": {"temperature": 0},
        **fields,
    }


def conversation() -> Fields:
    """Return a request in the middle of a tool loop, with reasoning of a turn before it."""
    messages = agent_requests(2, 1, header=[system(150)])[-1]
    return hello(**MESSAGES.body(messages, tools(3)))


async def answer(client: Client) -> object:
    return await client.messages.create(**hello(system="Be brief.", stop_sequences=["never"]))


async def stream(client: Client) -> object:
    return await collect(await client.messages.create(**hello(stream=True)))


async def streamed_message(client: Client) -> object:
    async with client.messages.stream(**conversation()) as stream:
        events = await collect(stream)
        return events, await stream.get_final_message()


async def tool_loop(client: Client) -> object:
    return await client.messages.create(**conversation())


async def thinking(client: Client) -> object:
    fields = hello(thinking=THINK_BRIEFLY)
    return [
        await client.messages.create(**fields),
        await collect(await client.messages.create(**fields, stream=True)),
    ]


async def tool_call(client: Client) -> object:
    """Have a tool called, streaming and not, and send its result back."""
    fields = hello(tools=[LOOK], tool_choice={"type": "any"}, max_tokens=100)
    message = await client.messages.create(**fields)
    assert message.stop_reason == "tool_use"
    used = next(block for block in message.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "nothing there"}
    messages = [
        *fields["messages"],
        {"role": "assistant", "content": [used.model_dump(exclude_none=True)]},
        {"role": "user", "content": [result]},
    ]
    async with client.messages.stream(**fields) as stream:
        events = await collect(stream)
    return message, events, await client.messages.create(**{**fields, "messages": messages})


async def counting(client: Client) -> object:
    fields = {key: conversation()[key] for key in ("model", "messages", "tools", "system")}
    return await client.messages.count_tokens(**fields)


async def models(client: Client) -> object:
    return (await client.models.list()).data


async def leaving(client: Client) -> object:
    """Leave in the middle of a stream, and ask the same again."""
    events = await first_events(
        await client.messages.create(**hello(stream=True, max_tokens=3000)), 8
    )
    return events, await client.messages.create(**hello())


async def wrong_messages(client: Client) -> object:
    return await client.messages.create(**hello(messages="wrong"))


async def wrong_limit(client: Client) -> object:
    return await client.messages.create(**hello(max_tokens=-5))


async def too_long(client: Client) -> object:
    return await client.messages.create(**hello(messages=TOO_LONG))


async def too_long_stream(client: Client) -> object:
    return await client.messages.create(**hello(messages=TOO_LONG, stream=True))


async def wrong_count(client: Client) -> object:
    return await client.messages.count_tokens(model="local", messages="wrong")  # type: ignore[arg-type]


async def unknown_route(client: Client) -> object:
    return await client.messages.batches.list()


async def unknown_route_posted(client: Client) -> object:
    return await client.messages.batches.create(requests=[])


CALLS = (tool_call,)
"""For a model that calls tools when it must."""
USES = (
    answer,
    stream,
    streamed_message,
    tool_loop,
    thinking,
    counting,
    models,
    leaving,
    wrong_messages,
    wrong_limit,
    too_long,
    too_long_stream,
    wrong_count,
    unknown_route,
    unknown_route_posted,
)
