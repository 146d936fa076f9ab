"""mypy --strict knows the parameters and the result of a task at every submit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mypy import api

from tests.tidy.reading import ROOT, SRC

PROGRAM = """
import asyncio
from dataclasses import dataclass

from tenure import Client, Job, task
from tenure.sync import Client as SyncClient
from tenure.testing import serving


@dataclass
class Greeting:
    text: str


@task("greet", timeout_s=10)
async def greet(name: str, loud: bool = False) -> Greeting:
    return Greeting(name)


@task("resize")
def resize(job: Job, width: int) -> str:
    return str(width)


@task("old")
async def old(job: Job) -> int:
    return 1


async def main() -> None:
    async with Client("memory://x") as client:
        handle = await client.submit(greet, name="Ada", loud=True)
        greeting: Greeting = await handle.result(timeout_s=30)
        await client.submit(greet, "Ada")
        await client.submit(greet, nmae="Ada")  # error: parameter
        await client.submit(greet, name=7)  # error: argument
        await client.submit(greet)  # error: missing
        number: int = await handle.result()  # error: result
        text: str = await (await client.submit(resize, width=3)).result()
        await client.submit(resize, width="3")  # error: argument
        delayed = await client.submit(greet.call(name="Ada"), delay_s=5, key="k")
        greeting = await delayed.result()
        await client.submit(greet.call(nmae="Ada"))  # error: parameter of a call
        await client.submit(greet.call(name="Ada"), dealy_s=5)  # error: option
        await client.submit("greet", {"name": "Ada"}, priority=3)
        one: int = await (await client.submit(old, {"any": 1}, attempts=2)).result()
        many = await client.submit_many([greet.call(name="a"), greet.call(name="b")])
        greeting = await many[0].result()
        number = await many[0].result()  # error: result of many
        await client.submit_many([greet.call(name="a"), resize.call(width=3), ("old", {})])
        async for event in handle.events():
            state: str | None = event.state
        again = client.handle("id", greet)
        greeting = await again.result()


def plain() -> None:
    with SyncClient("memory://x") as client:
        greeting: Greeting = client.submit(greet, name="Ada").result()
        client.submit(greet, nmae="Ada")  # error: parameter, in plain calls
        client.submit_many([greet.call(name="a"), resize.call(width=3)], errors="return")
        number: int = client.submit(greet, name="Ada").result()  # error: result, in plain calls


async def tested() -> None:
    async with serving(greet, resize, old) as queue:
        greeting: Greeting = await (await queue.client.submit(greet, name="Ada")).result()


asyncio.run(main())
"""


@pytest.mark.timeout(300)
def test_mypy_finds_wrong_parameters_and_wrong_results_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    monkeypatch.setenv("MYPYPATH", str(SRC))
    monkeypatch.chdir(ROOT)  # where mypy has its settings and what it knows from the last time
    out, err, _ = api.run(["--strict", "--no-error-summary", str(program)])
    assert not err
    found = {int(match[1]) for match in re.finditer(r"program\.py:(\d+): error", out)}
    expected = {number for number, line in enumerate(PROGRAM.splitlines(), 1) if "# error:" in line}
    assert found == expected, out


EXAMPLES = ROOT / "examples"
NAMES = [path.name for path in sorted(EXAMPLES.glob("*.py"))]


def checked(folder: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> str:
    """What mypy --strict says of these programs."""
    monkeypatch.setenv("MYPYPATH", f"{SRC}:{folder}")
    monkeypatch.chdir(ROOT)
    paths = [str(folder / name) for name in names]
    out, err, _ = api.run(["--strict", "--no-error-summary", *paths])
    assert not err
    return out


@pytest.mark.timeout(300)
def test_the_examples_are_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked(EXAMPLES, monkeypatch, *NAMES) == ""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("await_result.py", 'name="Ada"', 'nmae="Ada"'),
        ("await_result.py", "print(await handle", "number: int = (await handle"),
        ("pydantic_models.py", "order=Order", "ordre=Order"),
        ("pydantic_models.py", "receipt = await", "receipt: Order = await"),
    ],
)
def test_a_wrong_parameter_or_result_in_an_example_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, right: str, wrong: str
) -> None:
    text = (EXAMPLES / name).read_text()
    assert right in text
    (tmp_path / name).write_text(text.replace(right, wrong))
    number = next(n for n, line in enumerate(text.splitlines(), 1) if right in line)
    assert re.search(rf"{name}:{number}: error", checked(tmp_path, monkeypatch, name))
