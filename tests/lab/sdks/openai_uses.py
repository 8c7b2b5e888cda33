"""What users do with OpenAI's SDK: chat completions, completions and Responses."""

from typing import Any

from openai import AsyncOpenAI

from tests.lab.apis import RESPONSES
from tests.lab.conversation import agent_requests, system, tools
from tests.lab.sdks.anthropic_uses import LOOK, TOO_LONG
from tests.lab.sdks.observing import collect, first_events

Client = AsyncOpenAI
Fields = dict[str, Any]

_FUNCTION = {
    "name": LOOK["name"],
    "description": LOOK["description"],
    "parameters": LOOK["input_schema"],
}
CHAT_TOOL = {"type": "function", "function": _FUNCTION}
RESPONSES_TOOL = {"type": "function", **_FUNCTION, "strict": True}
THINK_BRIEFLY = {"thinking_budget_tokens": 4}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "look", "schema": LOOK["input_schema"]}}


def hello(**fields: Any) -> Fields:
    messages = [{"role": "user", "content": "hello"}]
    return {"model": "local", "max_tokens": 24, "messages": messages, "temperature": 0, **fields}


def respond(**fields: Any) -> Fields:
    return {
        "model": "local",
        "max_output_tokens": 24,
        "input": "hello",
        "temperature": 0,
        "store": False,
        **fields,
    }


def chat_conversation() -> Fields:
    return hello(messages=agent_requests(2, 1, header=[system(150)])[-1], tools=tools(3))


def responses_conversation() -> Fields:
    messages = agent_requests(2, 1, header=[system(150)])[-1]
    return respond(**RESPONSES.body(messages, tools(3)))


async def chat(client: Client) -> object:
    return await client.chat.completions.create(
        **hello(logprobs=True, top_logprobs=1, stop=["never"], prompt_cache_key="hello")
    )


async def chat_stream(client: Client) -> object:
    fields = hello(stream=True, stream_options={"include_usage": True})
    return await collect(await client.chat.completions.create(**fields))


async def chat_tool_loop(client: Client) -> object:
    fields = chat_conversation()
    async with client.chat.completions.stream(**fields) as stream:
        events = await collect(stream)
    return events, await client.chat.completions.create(**fields)


async def chat_tool_call(client: Client) -> object:
    """Have a tool called, streaming and not, and send its result back."""
    fields = hello(tools=[CHAT_TOOL], tool_choice="required", max_tokens=100)
    completion = await client.chat.completions.create(**fields)
    message = completion.choices[0].message
    assert message.tool_calls
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "nothing there"}
    messages = [*fields["messages"], message.model_dump(exclude_none=True), result]
    async with client.chat.completions.stream(**fields) as stream:
        events = await collect(stream)
    after = await client.chat.completions.create(**{**fields, "messages": messages})
    return completion, events, after


async def chat_schema(client: Client) -> object:
    return await client.chat.completions.create(
        **hello(response_format=SCHEMA, extra_body=THINK_BRIEFLY, max_tokens=100)
    )


async def chat_choices(client: Client) -> object:
    completion = await client.chat.completions.create(**hello(n=2))
    # Each choice is a row of one batch, where near ties fall differently, and rows follow the slots.
    answers = [choice.model_dump(exclude={"index"}) for choice in completion.choices]
    indexes = [choice.index for choice in completion.choices]
    return indexes, sorted(answers, key=repr), completion.model_dump(exclude={"choices"})


async def chat_leaving(client: Client) -> object:
    stream = await client.chat.completions.create(**hello(stream=True, max_tokens=3000))
    return await first_events(stream, 8), await client.chat.completions.create(**hello())


async def completion(client: Client) -> object:
    fields: Fields = {"model": "local", "prompt": "def main():", "max_tokens": 12, "temperature": 0}
    return [
        await client.completions.create(**fields),
        await collect(await client.completions.create(**fields, stream=True)),
    ]


async def response(client: Client) -> object:
    return await client.responses.create(**respond(instructions="Be brief."))


async def response_stream(client: Client) -> object:
    return await collect(await client.responses.create(**respond(stream=True)))


async def response_tool_loop(client: Client) -> object:
    fields = responses_conversation()
    async with client.responses.stream(**fields) as stream:
        events = await collect(stream)
    return events, await client.responses.create(**fields)


async def response_tool_call(client: Client) -> object:
    fields = respond(tools=[RESPONSES_TOOL], tool_choice="required", max_output_tokens=100)
    first = await client.responses.create(**fields)
    call = next(item for item in first.output if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "nothing there"}
    asked = {"role": "user", "content": "hello"}
    items = [asked, call.model_dump(exclude_none=True), result]
    async with client.responses.stream(**fields) as stream:
        events = await collect(stream)
    return first, events, await client.responses.create(**{**fields, "input": items})


async def response_leaving(client: Client) -> object:
    stream = await client.responses.create(**respond(stream=True, max_output_tokens=3000))
    return await first_events(stream, 8), await client.responses.create(**respond())


async def counting(client: Client) -> object:
    fields = {key: responses_conversation()[key] for key in ("model", "input", "tools")}
    return await client.responses.input_tokens.count(**fields)


async def models(client: Client) -> object:
    return (await client.models.list()).data


async def wrong_messages(client: Client) -> object:
    return await client.chat.completions.create(**hello(messages=[]))


async def wrong_input(client: Client) -> object:
    return await client.responses.create(**respond(previous_response_id="resp_1"))


async def too_long(client: Client) -> object:
    return await client.chat.completions.create(**hello(messages=TOO_LONG))


async def too_long_stream(client: Client) -> object:
    return await client.chat.completions.create(**hello(messages=TOO_LONG, stream=True))


async def too_long_response(client: Client) -> object:
    return await client.responses.create(**respond(input=TOO_LONG, stream=True))


async def no_embeddings(client: Client) -> object:
    return await client.embeddings.create(model="local", input="hello")


async def unknown_route(client: Client) -> object:
    return await client.responses.retrieve("resp_1")


CALLS = (chat_tool_call, response_tool_call)
"""For a model that calls tools when it must."""
USES = (
    chat,
    chat_stream,
    chat_tool_loop,
    chat_schema,
    chat_choices,
    chat_leaving,
    completion,
    response,
    response_stream,
    response_tool_loop,
    response_leaving,
    counting,
    models,
    wrong_messages,
    wrong_input,
    too_long,
    too_long_stream,
    too_long_response,
    no_embeddings,
    unknown_route,
)
