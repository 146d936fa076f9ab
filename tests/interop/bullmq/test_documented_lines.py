"""The lines that the documentation shows work together, as they stand there."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tenure.store.embedded import locate_node
from tests.interop.bullmq.peer import HERE

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "docs" / "contracts" / "bullmq.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(), re.DOTALL)


def here(code: str, port: int) -> str:
    """The same lines, on the test's own server, with the package under its alias."""
    code = code.replace("localhost:6379", f"127.0.0.1:{port}").replace("'localhost'", "'127.0.0.1'")
    return code.replace("port: 6379", f"port: {port}").replace("'bullmq'", "'bullmq6'")


def wrapped(lines: list[str], times: int) -> str:
    """The six lines as a program that runs the last four so many times."""
    head, tail = "\n".join(lines[:2]), "\n".join(lines[2:])
    body = f"{tail}\nawait queue.close(); await events.close();"
    loop = f"for (let n = 0; n < {times}; n += 1) {{\n{body}\n}}"
    return f"{head}\n(async () => {{\n{loop}\nprocess.exit(0);\n}})();"


async def said_by_node(folder: Path, port: int, queue: str, times: int) -> tuple[str, str]:
    """What Node's lines print and complain of beside Python's, the last four run so many times."""
    (javascript,) = blocks("javascript")
    program = folder / "app.py"
    program.write_text(here(blocks("python")[0], port).replace("video-generation", queue))
    lines = [line for line in javascript.splitlines() if line.strip()]
    assert len(lines) == 6
    script = here(wrapped(lines, times), port).replace("video-generation", queue)
    worker = subprocess.Popen([sys.executable, str(program)], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        node = await asyncio.create_subprocess_exec(
            str(locate_node()),
            "-e",
            script,
            cwd=HERE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, errors = await asyncio.wait_for(node.communicate(), 60)
    finally:
        worker.kill()
        worker.wait()
    return out.decode(), errors.decode()


@pytest.mark.runs("docs/contracts/bullmq.md:javascript", "docs/contracts/bullmq.md:python")
async def test_six_lines_of_node_and_six_of_python_work_together(port: int, tmp_path: Path) -> None:
    out, errors = await said_by_node(tmp_path, port, "video-generation", times=1)
    assert out.strip() == "{ frames: 72 }", errors


async def test_a_job_that_ends_at_once_is_heard_by_a_new_listener(
    port: int, tmp_path: Path
) -> None:
    # Without `lastEventId` one in seven was waited for for ever: it ended before the first read.
    out, errors = await said_by_node(tmp_path, port, "quick-films", times=60)
    assert out.split("\n")[:-1] == ["{ frames: 72 }"] * 60, errors


async def test_the_lines_of_the_producer_run_as_they_stand(port: int, tmp_path: Path) -> None:
    _, lines = blocks("python")
    program = tmp_path / "feed.py"
    body = "".join(f"    {line}\n" for line in here(lines, port).splitlines())
    close = "    await producer.close(); await events.close()\n"
    program.write_text(f"import asyncio\n\nasync def main():\n{body}{close}\nasyncio.run(main())\n")
    app = tmp_path / "app.py"
    url = f"bullmq+redis://127.0.0.1:{port}/0?queue=mail"
    app.write_text(
        "from tenure import Worker, task\n"
        "@task('*')\nasync def done(job):\n    return job.task\n"
        f"Worker([done], queues=['{url}']).run()\n"
    )
    worker = subprocess.Popen([sys.executable, str(app)], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        feed = await asyncio.create_subprocess_exec(
            sys.executable, str(program), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, errors = await asyncio.wait_for(feed.communicate(), 30)
    finally:
        worker.kill()
        worker.wait()
    assert out.decode().strip() == "welcome", errors.decode()
