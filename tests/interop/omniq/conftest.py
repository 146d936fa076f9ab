"""The peers of the omniq contract: the official package 4.0.0 and 1.7.0, on a private Redis."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncGenerator, Callable, Generator
from pathlib import Path

import pytest

from tenure.contracts.omniq.__main__ import write_scripts
from tests.interop.omniq.peer import Official, Ours

_unique = itertools.count(1)


@pytest.fixture(scope="session")
def official(
    port: int, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Callable[..., Official]]:
    """The official client by version, on its own scripts or on ours; made when first asked for."""
    made: dict[tuple[str, bool], Official] = {}

    def party(version: str, *, on_our_scripts: bool = False) -> Official:
        key = version, on_our_scripts
        if key not in made:
            folder: Path | str = ""
            if on_our_scripts:
                folder = tmp_path_factory.mktemp("scripts")
                write_scripts(folder)
            made[key] = Official(version, port, str(folder))
        return made[key]

    yield party
    for each in made.values():
        each.close()


@pytest.fixture
async def ours(server: str) -> AsyncGenerator[Ours]:
    party = Ours(server)
    yield party
    await party.close()


@pytest.fixture
def name() -> str:
    """A queue of one's own."""
    return f"i{os.getpid()}-{next(_unique)}"
