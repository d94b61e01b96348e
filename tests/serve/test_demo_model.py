"""The official client against the demo model: the whole of the interface once, on a model that can say something."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel
from server_rig import ServerRig, starting

from cb_engine import EngineConfig
from cb_engine.models import load_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

QUESTIONS = [
    "What is the capital of France?", "Name three colours.", "What is 2 + 3?", "Who wrote Hamlet?",
    "Say hello in Spanish.", "What do bees make?", "Is the sun a star?", "Why do leaves fall?",
    "What is water made of?", "Name a big cat.", "What is the opposite of hot?", "How many days has a week?",
    "What is a noun?", "Where do penguins live?", "What is ice?", "Count from one to five.",
]  # fmt: skip


class City(BaseModel):
    """A city in a country."""

    name: str
    country: Literal["France", "Spain", "Italy"]


@pytest.fixture(scope="module")
def rig() -> Iterator[ServerRig]:
    config = EngineConfig(num_blocks=512, speculative={"method": "ngram"})
    with starting(lambda: load_model("demo"), config=config, model_name="demo") as made:
        made.wait_until(lambda: made.get("/health").status_code == 200, 120)
        yield made
        made.wait_until_idle()


def body(i: int, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTIONS[i]}]
    return {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 48, **fields}


async def ask(client: openai.AsyncOpenAI, i: int, stream: bool, **fields: Any) -> tuple[str, str]:
    if not stream:
        choice = (await client.chat.completions.create(**body(i, **fields))).choices[0]
        return choice.message.content or "", choice.finish_reason
    text, end = "", ""
    async for chunk in await client.chat.completions.create(**body(i, **fields), stream=True):
        text += chunk.choices[0].delta.content or ""
        end = chunk.choices[0].finish_reason or end
    return text, end


def at_once(rig: ServerRig, jobs: list[tuple[int, bool]], **fields: Any) -> list[tuple[str, str]]:
    async def run() -> list[tuple[str, str]]:
        async with rig.async_client() as client:
            return await asyncio.gather(*(ask(client, i, stream, **fields) for i, stream in jobs))

    return asyncio.run(run())


def test_streams_and_whole_answers_and_sixteen_at_a_time_are_equal(rig: ServerRig):
    everything = range(len(QUESTIONS))
    alone = [at_once(rig, [(i, False)])[0] for i in everything]
    assert [at_once(rig, [(i, True)])[0] for i in everything] == alone
    assert at_once(rig, [(i, False) for i in everything]) == alone
    assert at_once(rig, [(i, True) for i in everything]) == alone
    assert "Paris" in alone[0][0]
    assert {end for _, end in alone} <= {"stop", "length"}
    assert len({text for text, _ in alone}) == len(QUESTIONS)


def test_seeds_reproduce_whatever_else_runs(rig: ServerRig):
    jobs = [(i, i % 2 == 0) for i in range(8)]
    drawn = at_once(rig, jobs, temperature=0.9, seed=7, top_p=0.95)
    assert [at_once(rig, [job], temperature=0.9, seed=7, top_p=0.95)[0] for job in jobs] == drawn
    assert at_once(rig, jobs, temperature=0.9, seed=8, top_p=0.95) != drawn


def test_schemas(rig: ServerRig):
    client = rig.client()
    parsed = client.chat.completions.parse(
        model="demo",
        messages=[{"role": "user", "content": "Which city is Paris?"}],
        response_format=City,
        max_tokens=200,
    )
    assert isinstance(parsed.choices[0].message.parsed, City)
    answer = client.responses.parse(model="demo", input="Which city is Rome?", text_format=City, max_output_tokens=200)
    assert isinstance(answer.output_parsed, City)


def test_tools(rig: ServerRig):
    tools = [pydantic_function_tool(City, name="show_city")]
    fields: dict[str, Any] = {"tools": tools, "tool_choice": "required", "max_tokens": 200}
    choice = rig.client().chat.completions.create(**body(0, **fields)).choices[0]
    assert choice.finish_reason == "tool_calls"
    calls = choice.message.tool_calls or ()
    assert calls
    City.model_validate_json(calls[0].function.arguments)
    with rig.client().chat.completions.stream(**body(0, **fields)) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion().choices[0].message
    assert [(c.function.name, c.function.arguments) for c in final.tool_calls or ()] == [
        (c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()
    ]
    messages = [
        {"role": "user", "content": QUESTIONS[0]},
        choice.message,
        *({"role": "tool", "tool_call_id": c.id, "content": "{}"} for c in choice.message.tool_calls or ()),
    ]
    rig.client().chat.completions.create(**{**body(0), "messages": messages, "tools": tools})


def test_completions_and_log_probabilities(rig: ServerRig):
    client = rig.client()
    scored = client.completions.create(
        model="demo", prompt="The capital of France is Paris", echo=True, max_tokens=0, logprobs=1, temperature=0
    ).choices[0]
    assert scored.text == "The capital of France is Paris"
    assert scored.logprobs is not None
    by_token = dict(zip(scored.logprobs.tokens or (), scored.logprobs.token_logprobs or (), strict=True))
    assert by_token[" Paris"] > -3.0
    assert "".join(scored.logprobs.tokens or ()) == scored.text
    several = client.completions.create(model="demo", prompt=["One, two,", "A, B,"], max_tokens=8, temperature=0, n=2)
    assert len(several.choices) == 4


def test_stop_strings_bias_and_penalties(rig: ServerRig):
    client = rig.client()
    counted = client.chat.completions.create(**body(15, stop=["3", "three"])).choices[0]
    assert counted.finish_reason == "stop"
    assert "3" not in (counted.message.content or "")
    tokens = rig.post("/tokenize", {"prompt": "Paris", "add_special_tokens": False}).json()["tokens"]
    tokens += rig.post("/tokenize", {"prompt": " Paris", "add_special_tokens": False}).json()["tokens"]
    banned = client.chat.completions.create(**body(0, logit_bias={str(t): -100 for t in tokens}))
    assert "Paris" not in (banned.choices[0].message.content or "")


def test_responses_in_events(rig: ServerRig):
    with rig.client().responses.stream(model="demo", input=QUESTIONS[0], temperature=0, max_output_tokens=48) as stream:
        events = list(stream)
        final = stream.get_final_response()
    whole = rig.client().responses.create(model="demo", input=QUESTIONS[0], temperature=0, max_output_tokens=48)
    assert final.output_text == whole.output_text
    assert events[-1].type == "response.completed"
    assert json.loads(final.model_dump_json())["usage"]["output_tokens"] > 0


def test_a_conversation(rig: ServerRig):
    messages: list[Any] = [{"role": "system", "content": "Answer briefly."}]
    for question in ("My name is Ada.", "What is my name?"):
        messages.append({"role": "user", "content": question})
        answer = rig.client().chat.completions.create(**{**body(0), "messages": messages})
        messages.append(answer.choices[0].message)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens_details.cached_tokens or 0) > 0, "the first turn was in the cache"
