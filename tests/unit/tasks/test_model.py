"""`chat`, `plan` and `code` against a real HTTP server that speaks the OpenAI protocol."""

from __future__ import annotations

import socket
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from tenure.core.errors import LeaseLost, UsageError
from tenure.core.outcome import Fatal, Retry
from tenure.tasks import ModelSettings
from tenure.tasks.model import ModelServer, chat, code, plan
from tests.unit.tasks.attempt import Attempt
from tests.unit.tasks.model_server import Script, model_server


def talking(script: Script, **settings: Any) -> AbstractAsyncContextManager[ModelServer]:
    @asynccontextmanager
    async def opened() -> Any:
        server = ModelServer(ModelSettings(script.url, **({"model": "m1"} | settings)))
        try:
            yield server
        finally:
            await server.close()

    return opened()


async def test_tokens_arrive_as_events_and_the_text_as_result() -> None:
    job = Attempt({"prompt": "hi", "system": "be brief", "temperature": 0.5})
    with model_server() as script:
        async with talking(script, key="s3cret") as server:
            result = await chat(job, server)
    assert result == {
        "text": "Hello, world",
        "model": "m1",
        "finish_reason": "stop",
        "usage": {"total_tokens": 3},
    }
    assert job.text_of("token") == "Hello, world"
    path, body, headers = script.asked[0]
    assert path == "/v1/chat/completions"
    assert [turn["role"] for turn in body["messages"]] == ["system", "user"]
    assert (body["stream"], body["temperature"], headers["Authorization"]) == (
        True,
        0.5,
        "Bearer s3cret",
    )


async def test_a_fast_model_writes_no_more_than_about_twenty_events_a_second() -> None:
    job = Attempt({"prompt": "count"})
    tokens = [f"{n} " for n in range(200)]
    with model_server(tokens=tokens, pause_s=0.002) as script:
        async with talking(script) as server:
            await chat(job, server)
    assert job.text_of("token") == "".join(tokens)
    seconds = job.times[-1] - job.times[0]
    assert len(job.events) <= 20 * seconds + 3  # the first goes at once, the rest at the end
    assert len(job.events) > 3


async def test_a_slow_model_is_heard_before_it_has_finished() -> None:
    """No token waits for the next one: the gap between events is the model's own."""
    job = Attempt({"prompt": "slowly"})
    with model_server(tokens=["a", "b", "c"], pause_s=0.2) as script:
        async with talking(script) as server:
            await chat(job, server)
    assert [event["data"]["text"] for event in job.events] == ["a", "b", "c"]
    assert job.times[1] - job.times[0] > 0.1


async def test_a_server_that_cannot_stream_is_understood() -> None:
    with model_server(streams=False) as script:
        async with talking(script) as server:
            result = await chat(Attempt({"prompt": "hi"}), server)
    assert (result["text"], result["usage"]) == ("Hello, world", {"total_tokens": 3})


async def test_without_a_named_model_the_first_one_listed_is_used() -> None:
    with model_server() as script:
        async with talking(script, model="") as server:
            result = await chat(Attempt({"prompt": "hi"}), server)
            await chat(Attempt({"prompt": "again"}), server)
    assert result["model"] == "listed-model"
    assert [path for path, _, _ in script.asked].count("/v1/models") == 1


@pytest.mark.parametrize(("status", "header", "after_ms"), [(429, "7", 7000), (503, "", None)])
async def test_an_error_that_passes_asks_for_a_retry_after_the_time_it_names(
    status: int, header: str, after_ms: int | None
) -> None:
    headers = {"Retry-After": header} if header else {}
    with model_server(status=status, headers=headers) as script:
        async with talking(script) as server:
            with pytest.raises(Retry, match="not today") as raised:
                await chat(Attempt({"prompt": "hi"}), server)
    assert raised.value.after_ms == after_ms


@pytest.mark.parametrize("status", [400, 401, 404])
async def test_an_error_that_stays_ends_the_job(status: int) -> None:
    with model_server(status=status) as script:
        async with talking(script) as server:
            with pytest.raises(Fatal, match=f"answered {status}: not today"):
                await chat(Attempt({"prompt": "hi"}), server)


@pytest.mark.parametrize("wishes", [{"breaks_off": True}, {"error_in_stream": "out of memory"}])
async def test_a_broken_stream_is_tried_again_and_never_taken_for_an_answer(
    wishes: dict[str, Any],
) -> None:
    with model_server(**wishes) as script:
        async with talking(script) as server:
            with pytest.raises(Retry, match="broke off"):
                await chat(Attempt({"prompt": "hi"}), server)


async def test_a_server_that_is_away_asks_for_a_retry() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        server = ModelServer(ModelSettings(f"http://127.0.0.1:{unused.getsockname()[1]}", "m"))
        with pytest.raises(Retry, match="could not be used"):
            await chat(Attempt({"prompt": "hi"}), server)
        await server.close()


async def test_errors_of_the_model_server_hold_neither_its_address_nor_the_key() -> None:
    key = "sk-very-s3cret"
    with model_server(status=401) as script:
        script.says = f"{script.url}: wrong key {key}"
        async with talking(script, key=key) as server:
            with pytest.raises(Fatal, match="the model server answered 401") as refused:
                await chat(Attempt({"prompt": "x"}), server)
    async with talking(script, key=key) as server:
        with pytest.raises(Retry, match="the model server could not be used") as away:
            await chat(Attempt({"prompt": "x"}), server)
    for raised in (refused, away):
        assert script.url[7:] not in str(raised.value)
        assert "s3cret" not in str(raised.value)


async def test_a_model_that_falls_silent_asks_for_a_retry() -> None:
    with model_server(pause_s=3.0) as script:
        async with talking(script, timeout_s=0.2) as server:
            with pytest.raises(Retry, match="could not be used"):
                await chat(Attempt({"prompt": "hi"}), server)


async def test_a_lost_lease_stops_the_conversation() -> None:
    job = Attempt({"prompt": "hi"}, report_error=LeaseLost("j1"))
    with model_server(pause_s=0.05) as script:
        async with talking(script) as server:
            with pytest.raises(LeaseLost):
                await chat(job, server)


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        ({}, 'either "prompt" or "messages"'),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "either"),
        ({"promt": "a"}, "unknown field `promt`"),
        ({"prompt": 3}, "Expected `str`"),
        ([], "Expected `object`"),
    ],
)
async def test_a_payload_that_does_not_fit_ends_the_job_with_what_would(
    payload: Any, words: str
) -> None:
    with model_server() as script:
        async with talking(script) as server:
            with pytest.raises(Fatal) as raised:
                await chat(Attempt(payload), server)
    assert words in str(raised.value)
    assert "fields: prompt, messages" in str(raised.value)
    assert script.asked == []


async def test_a_plan_comes_as_a_list_of_steps() -> None:
    with model_server(tokens=['["dig', '", "plant"]']) as script:
        async with talking(script) as server:
            result = await plan(Attempt({"goal": "a garden", "steps_max": 2}), server)
    assert result["steps"] == ["dig", "plant"]


async def test_code_comes_apart_from_the_words_about_it() -> None:
    with model_server(tokens=["```python\n", "print(1)\n", "```\nIt prints."]) as script:
        async with talking(script) as server:
            result = await code(Attempt({"prompt": "print one", "language": "Python"}), server)
    assert (result["code"], result["language"]) == ("print(1)\n", "python")
    assert "Python code" in script.asked[0][1]["messages"][0]["content"]


def test_an_address_that_is_none_is_told_at_once() -> None:
    with pytest.raises(UsageError, match="one looks like http"):
        ModelServer(ModelSettings("localhost:8080"))
