"""Typed handlers: what is read from a payload, what is refused, and what stays as it was."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Annotated, Any

import msgspec
import pytest
from pydantic import BaseModel

from tenure import Job, task
from tenure.core.errors import InvalidJob, UsageError
from tenure.core.outcome import Fatal
from tenure.worker.task import Tasks


@dataclass
class Point:
    x: int
    y: int = 0


class Model(BaseModel):
    name: str
    size: int


@task("typed")
async def typed(
    job: Job,
    count: Annotated[int, msgspec.Meta(ge=1)],
    at: datetime | None = None,
    points: list[Point] = [],  # noqa: B006  # the handler's own default
    model: Model | None = None,
) -> Model: ...


def test_a_payload_becomes_arguments_of_the_declared_types() -> None:
    assert typed.parameters is not None
    payload = (
        b'{"count":2,"at":"2026-11-18T09:00:00Z","points":[{"x":1}],"model":{"name":"a","size":3}}'
    )
    assert typed.parameters.read(payload) == {
        "count": 2,
        "at": datetime(2026, 11, 18, 9, tzinfo=timezone.utc),  # noqa: UP017
        "points": [Point(1)],
        "model": Model(name="a", size=3),
    }
    assert typed.parameters.read(b'{"count":2}') == {"count": 2}
    assert typed.result_type is Model


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"{}", "count: it is missing"),
        (b'{"count":"2"}', "count: expected `int`, got `str`"),
        (b'{"count":0}', "count: expected `int` >= 1"),
        (b'{"count":1,"ponits":[]}', "ponits: there is no such field, did you mean `points`?"),
        (b'{"count":1,"points":[{"y":2}]}', "points[0].x: it is missing"),
        (b'{"count":1,"model":{"name":"a","size":"big"}}', "model: size: Input should be a valid"),
        (b"[1]", "Expected `object`, got `array`"),
        (b"nonsense", "JSON is malformed"),
    ],
)
def test_a_payload_that_does_not_fit_is_fatal_and_names_field_and_reason(
    payload: bytes, reason: str
) -> None:
    assert typed.parameters is not None
    with pytest.raises(Fatal) as refused:
        typed.parameters.read(payload)
    assert reason in str(refused.value)
    assert "typed" in str(refused.value)
    assert refused.value.code == "invalid_payload"


def test_arguments_become_a_payload_that_the_handler_would_take() -> None:
    call = typed.call(3, points=[Point(1, 2)], model=Model(name="a", size=3))
    assert call.payload == b'{"count":3,"points":[{"x":1,"y":2}],"model":{"name":"a","size":3}}'
    for kwargs in ({}, {"count": 1, "more": 2}, {"count": "x"}, {"count": 1, "at": object()}):
        with pytest.raises(InvalidJob, match="typed"):
            typed.call(**kwargs)
    with pytest.raises(InvalidJob, match=r"U\+FFFD"):
        greet.call(name="half \ud83d")


@task("greet")
def greet(name: str) -> str:
    return name


@task("late")
def late(delay_s: int) -> int:
    return delay_s


def test_an_option_among_the_parameters_is_refused_with_the_form_that_takes_it() -> None:
    right = r"name; options go with a call: submit\(task\.call\(\.\.\.\), attempts=\.\.\., key="
    with pytest.raises(InvalidJob, match=right):
        greet.call(name="Ada", key="k", attempts=3)  # type: ignore[call-arg]
    with pytest.raises(InvalidJob) as refused:
        late.call(3, 4)  # type: ignore[call-arg]
    assert "options" not in str(refused.value)
    assert late.call(delay_s=3).payload == b'{"delay_s":3}'


def test_options_of_a_call_add_up() -> None:
    call = greet.call(name="Ada").with_options(key="k").with_options(delay_s=3)
    assert call.options == {"key": "k", "delay_s": 3}


def test_handlers_that_take_the_job_run_as_they_are() -> None:
    def plain(job): ...  # type: ignore[no-untyped-def]

    def typed_job(job: Job) -> None: ...

    def underscore(_: Job) -> None: ...

    def untyped(anything): ...  # type: ignore[no-untyped-def]

    def any_type(value: Any) -> None: ...

    def stand_in(job: Point) -> None: ...

    def star(*args: Any, **kwargs: Any) -> None: ...

    for handler in (plain, typed_job, underscore, untyped, any_type, stand_in, star):
        made = task("t")(handler)
        assert made.parameters is None, handler.__name__
        assert made.run is handler
    assert task("t")(plain).call({"a": 1}).payload == b'{"a":1}'  # type: ignore[call-arg]
    assert task("t")(plain).call(a=1).payload == b'{"a":1}'  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="one payload"):
        task("t")(plain).call(1, 2)  # type: ignore[call-arg]


def test_handlers_with_parameters_are_typed() -> None:
    def nothing() -> None: ...

    def one(name: str) -> None: ...

    def title(job: str) -> None: ...

    def late(name: str, job: Job) -> None: ...

    assert [task("t")(each).parameters.names for each in (nothing, one, title, late)] == [  # type: ignore[union-attr]
        [],
        ["name"],
        ["job"],
        ["name"],
    ]
    assert task("t")(nothing).parameters.read(b"null") == {}  # type: ignore[union-attr]


def test_parameters_that_cannot_come_from_a_payload_are_refused_at_once() -> None:
    def spread(name: str, *rest: str) -> None: ...

    def only(name: str, /, other: int) -> None: ...

    for handler in (spread, only):
        with pytest.raises(UsageError, match="cannot come from a payload"):
            task("t")(handler)


def test_a_type_that_is_not_known_is_named_when_the_worker_starts() -> None:
    def unresolved(name: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    made = task("lost")(unresolved)
    with pytest.raises(UsageError, match=r"'lost'.*Nowhere"):
        Tasks([made])
    assert made.result_type is Any


def test_parameters_travel_to_other_processes() -> None:
    assert greet.parameters is not None
    greet.parameters.read(b'{"name":"Ada"}')  # what it made for that cannot be pickled
    made = copy.copy(greet.parameters)
    assert made is not greet.parameters
    assert made.read(b'{"name":"Ada"}') == {"name": "Ada"}


class Many(BaseModel):
    items: list[int]


def test_a_payload_with_very_many_faults_makes_no_long_reason() -> None:
    """pydantic lists every fault: a megabyte of payload became twenty of text, in ten seconds."""

    @task("many")
    async def many(job: Job, given: Many) -> None: ...

    assert many.parameters is not None
    with pytest.raises(Fatal) as refused:
        many.parameters.read(b'{"given":{"items":[' + b",".join([b'"x"'] * 20_000) + b"]}}")
    assert "20000 values of Many are wrong" in str(refused.value)
    with pytest.raises(Fatal, match=r"items\.0: Input should be a valid integer"):
        many.parameters.read(b'{"given":{"items":["x"]}}')


def test_a_field_with_a_very_long_name_is_not_repeated_in_full() -> None:
    assert typed.parameters is not None
    with pytest.raises(Fatal, match="there is no such field") as refused:
        typed.parameters.read(b'{"count":2,"' + b"a" * 1_000_000 + b'":1}')
    assert len(str(refused.value)) < 1_000
