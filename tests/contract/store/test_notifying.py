"""A notice wakes one who waits for its topic: in this process or in another, busy ones never."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

from tenure.store.file_notifier import Listener, notify
from tests.waiting import until

WAITS = """
import asyncio, sys
from pathlib import Path
from tenure.store.file_notifier import Listener
async def main():
    woken = asyncio.Event()
    listener = Listener(Path(sys.argv[1]), "mail", woken.set)
    listener.open()
    print("waits", flush=True)
    await woken.wait()
    print("woken", flush=True)
asyncio.run(main())
"""


class Waiting:
    """Listeners of this process, and how often each was woken."""

    def __init__(self, folder: Path, *topics: str) -> None:
        self.woken = [0] * len(topics)
        self.listeners = [
            Listener(folder, topic, lambda at=at: self._woke(at)) for at, topic in enumerate(topics)
        ]
        for listener in self.listeners:
            assert listener.open()

    def _woke(self, at: int) -> None:
        self.woken[at] += 1

    def close(self) -> None:
        for listener in self.listeners:
            listener.remove()


async def test_a_notice_wakes_one_of_all_who_wait(tmp_path: Path) -> None:
    waiting = Waiting(tmp_path / "bells", *["mail"] * 5)
    assert notify(tmp_path / "bells", "mail")
    await until(lambda: sum(waiting.woken) == 1)
    await asyncio.sleep(0.05)  # nothing tells that no second one wakes
    assert sum(waiting.woken) == 1
    waiting.close()
    assert not (tmp_path / "bells").exists()


async def test_a_notice_of_one_topic_wakes_nobody_of_another(tmp_path: Path) -> None:
    waiting = Waiting(tmp_path / "bells", "mail", "other")
    assert notify(tmp_path / "bells", "other")
    await until(lambda: waiting.woken[1] == 1)
    assert waiting.woken[0] == 0
    waiting.close()


async def test_who_is_busy_is_passed_over(tmp_path: Path) -> None:
    waiting = Waiting(tmp_path / "bells", "mail", "mail", "mail")
    for busy in waiting.listeners[:2]:
        assert not busy.close()
    for number in range(1, 11):
        assert notify(tmp_path / "bells", "mail")
        await until(lambda number=number: waiting.woken[2] == number)
    assert waiting.woken[:2] == [0, 0]
    waiting.close()


async def test_a_notice_that_came_while_its_reader_was_busy_is_known_when_it_rests(
    tmp_path: Path,
) -> None:
    waiting = Waiting(tmp_path / "bells", "mail")
    assert notify(tmp_path / "bells", "mail")
    assert waiting.listeners[0].close()
    assert not notify(tmp_path / "bells", "mail")
    waiting.close()


async def test_a_process_that_died_is_passed_over_and_its_pipe_removed_later(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "bells"
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WAITS, str(folder), stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    assert await child.stdout.readline() == b"waits\n"
    assert notify(folder, "mail")
    assert await asyncio.wait_for(child.stdout.readline(), 10) == b"woken\n"
    await child.wait()
    (left,) = folder.iterdir()
    waiting = Waiting(folder, "mail")
    for number in range(1, 6):
        assert notify(folder, "mail")
        await until(lambda number=number: waiting.woken[0] == number)
    waiting.close()
    assert left.exists()
    os.utime(left, (time.time() - 3600, time.time() - 3600))
    assert not notify(folder, "mail")
    assert not left.exists()


async def test_nothing_that_is_no_pipe_is_written_to(tmp_path: Path) -> None:
    folder = tmp_path / "bells"
    waiting = Waiting(folder, "mail")
    (pipe,) = folder.iterdir()
    waiting.listeners[0].close()
    target = tmp_path / "precious"
    target.write_bytes(b"kept")
    (folder / f"{pipe.name}0").symlink_to(target)
    (folder / f"{pipe.name}1").write_bytes(b"kept")
    assert not notify(folder, "mail")
    assert target.read_bytes() == (folder / f"{pipe.name}1").read_bytes() == b"kept"
    waiting.close()
