"""Key rotation on a real store, while others read, refresh, rotate too, or are killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from tenure.vault import Binding, Secret, Vault, WrappedKey, new_kek, read_ring, rotate
from tests.contract.vault.rows import Rows

OLD, NEW, NEXT = new_kek("old"), new_kek("new"), new_kek("next")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "creds.db"


@pytest.fixture
async def rows(path: Path) -> AsyncIterator[Rows]:
    made = Rows(path)
    yield made
    await made.close()


async def fill(rows: Rows, vault: Vault, count: int) -> None:
    for number in range(count):
        bound = Binding(f"job-{number:05}", f"tenant-{number % 7}", 1)
        rows.put(bound, await vault.seal(Secret(f"secret of {number}"), bound))


async def opens(rows: Rows, vault: Vault, number: int) -> bool:
    bound, sealed = rows.read(f"job-{number:05}")
    return (await vault.open(sealed, bound)).text().startswith(f"secret of {number}")


@pytest.mark.clause("I-51")
async def test_a_rotation_moves_all_wrappings_and_touches_no_ciphertext(rows: Rows) -> None:
    await fill(rows, Vault(read_ring(OLD)), 1_000)
    before = rows.ciphertexts()
    done = await rotate(rows, Vault(read_ring(f"{NEW}\n{OLD}")), batch=100)
    assert (done.rewrapped, dict(done.left), done.unopened) == (1_000, {"new": 1_000}, ())
    assert rows.ciphertexts() == before
    alone = Vault(read_ring(NEW))
    assert all([await opens(rows, alone, number) for number in range(1_000)])


@pytest.mark.clause("I-51")
async def test_readers_never_meet_a_row_that_does_not_open(rows: Rows, path: Path) -> None:
    await fill(rows, Vault(read_ring(OLD)), 400)
    both = Vault(read_ring(f"{NEW}\n{OLD}"))
    reading = Rows(path)
    rotating = asyncio.Event()
    reads = 0

    async def read_on() -> None:
        nonlocal reads
        while not rotating.is_set():
            for number in range(0, 400, 7):
                assert await opens(reading, both, number)
                reads += 1
                await asyncio.sleep(0)

    reader = asyncio.create_task(read_on())
    await asyncio.sleep(0)
    for line in (f"{NEW}\n{OLD}", f"{OLD}\n{NEW}", f"{NEW}\n{OLD}"):
        await rotate(Breathing(rows), Vault(read_ring(line)), batch=10)
    rotating.set()
    await reader
    await reading.close()
    assert reads > 100
    assert dict(await rows.counts()) == {"new": 400}


class Breathing:
    """Lets others run between the steps of a rotation."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.counts = rows.counts
        self.close = rows.close

    async def page(self, *, not_under: str, after: str, limit: int) -> Sequence[WrappedKey]:
        await asyncio.sleep(0)
        return await self._rows.page(not_under=not_under, after=after, limit=limit)

    async def swap(self, pairs: Sequence[tuple[WrappedKey, WrappedKey]]) -> int:
        await asyncio.sleep(0)
        return await self._rows.swap(pairs)


class Refreshing(Breathing):
    """Between seeing a row and swapping it, its requester brings new credentials."""

    def __init__(self, rows: Rows, vault: Vault) -> None:
        super().__init__(rows)
        self._vault = vault
        self.lost = 0

    async def swap(self, pairs: Sequence[tuple[WrappedKey, WrappedKey]]) -> int:
        for old, _ in pairs[::3]:
            if old.binding.credential_version == 1:
                bound = Binding(old.binding.job_id, old.binding.requester_id, 2)
                number = int(old.binding.job_id[4:])
                fresh = Secret(f"secret of {number}, refreshed")
                self._rows.put(bound, await self._vault.seal(fresh, bound))
        done = await self._rows.swap(pairs)
        self.lost += len(pairs) - done
        return done


@pytest.mark.clause("I-51")
async def test_a_credential_refreshed_in_between_keeps_its_newer_wrapping(rows: Rows) -> None:
    old = Vault(read_ring(f"{OLD}\n{NEW}"))  # a worker that has not heard of the new active key
    await fill(rows, old, 300)
    racing = Refreshing(rows, old)
    done = await rotate(racing, Vault(read_ring(f"{NEW}\n{OLD}")), batch=30)
    assert racing.lost == 100
    assert dict(done.left) == {"new": 300}
    alone = Vault(read_ring(NEW))
    assert all([await opens(rows, alone, number) for number in range(300)])
    assert sum(rows.read(f"job-{n:05}")[0].credential_version == 2 for n in range(300)) == 100


@pytest.mark.clause("I-51")
async def test_two_rotations_beside_each_other_do_no_harm(rows: Rows, path: Path) -> None:
    await fill(rows, Vault(read_ring(OLD)), 300)
    other = Rows(path)
    ring = read_ring(f"{NEW}\n{OLD}")
    one, two = await asyncio.gather(
        rotate(Breathing(rows), Vault(ring), batch=20),
        rotate(Breathing(other), Vault(ring), batch=20),
    )
    await other.close()
    assert one.rewrapped + two.rewrapped == 300
    assert dict(await rows.counts()) == {"new": 300}


@pytest.mark.clause("I-51")
async def test_a_row_that_cannot_be_opened_is_named_and_holds_up_no_other(rows: Rows) -> None:
    await fill(rows, Vault(read_ring(OLD)), 30)
    bound = Binding("job-00007", "tenant-0", 9)
    rows.put(bound, (await Vault(read_ring(NEXT)).seal(Secret("x"), bound)))
    done = await rotate(rows, Vault(read_ring(f"{NEW}\n{OLD}")), batch=4)
    assert (done.rewrapped, done.unopened) == (29, ("job-00007",))
    assert dict(done.left) == {"new": 29, "next": 1}


CHILD = """
import asyncio, sys
from pathlib import Path
from tenure.vault import Vault, read_ring, rotate
from tests.contract.vault.rows import Rows

class Told(Rows):
    async def swap(self, pairs):
        done = await super().swap(pairs)
        print(done, flush=True)
        return done

asyncio.run(rotate(Told(Path(sys.argv[1])), Vault(read_ring(sys.argv[2])), batch=5))
"""


@pytest.mark.clause("I-51")
async def test_a_rotation_that_was_killed_is_finished_by_the_next_one(
    rows: Rows, path: Path
) -> None:
    await fill(rows, Vault(read_ring(OLD)), 2_000)
    ring = f"{NEW},{OLD}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path), ring],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        for _ in range(3):  # in the middle of its work
            assert int(child.stdout.readline()) > 0
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    counts = await rows.counts()
    assert 0 < counts["new"] < 2_000
    done = await rotate(rows, Vault(read_ring(ring)))
    assert dict(done.left) == {"new": 2_000}
    assert done.rewrapped == 2_000 - counts["new"]
    alone = Vault(read_ring(NEW))
    assert all([await opens(rows, alone, number) for number in range(2_000)])
