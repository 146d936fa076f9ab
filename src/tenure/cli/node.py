"""A small Node program and its pinned packages: brought by npm once, run as a child of ours.

The packages go into the data folder, under a name made from the lock file, and are complete or not
there at all: npm works in a folder of its own that is renamed when it has succeeded.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tenure.cli.config import process_environment
from tenure.cli.supervisor import output_lines
from tenure.core.errors import NotFound
from tenure.samples import NodeUnusable
from tenure.store.embedded import locate_node
from tenure.store.embedded.process import tied

_NPM_WITHIN_S = 300.0
_ENDS_WITHIN_S = 3.0
# The pinned packages alone: no native extras, and nothing of theirs runs at install time. Not `ci`,
# which wants every platform's extras in the lock file.
_NPM_WORDS = ("install", "--no-save", "--omit=optional", "--ignore-scripts")
_NPM_QUIET = ("--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error")


@dataclass(frozen=True, slots=True)
class NodeProgram:
    """`main.mjs` beside its packages. `package` names the one it shows, with its version."""

    node: Path
    folder: Path
    package: str

    async def run(
        self, *args: str, environment: Mapping[str, str], say: Callable[[str], None]
    ) -> str:
        """Run until it ends or this is cancelled, passing on its output; returns how it ended."""
        command = [str(self.node), "main.mjs", *args]
        async with _child(command, self.folder, environment) as process:
            async for line in output_lines(process):
                say(line)
            code = await process.wait()
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"


async def prepare(
    sources: Path, folder: Path, package: str, *, say: Callable[[str], None]
) -> NodeProgram:
    """The program in `sources` with its packages in `folder`; raises `NodeUnusable`."""
    version = _pinned(sources, package)
    try:
        node = await asyncio.to_thread(locate_node)
    except NotFound as error:
        raise NodeUnusable(str(error)) from None
    npm = _npm(node)
    lock = (sources / "package-lock.json").read_bytes()
    program = (sources / "main.mjs").read_bytes()
    name = f"{package}-{version}-{hashlib.sha256(lock + program).hexdigest()[:12]}"
    if not (folder / name).exists():
        say(f"npm brings {package} {version} into {folder / name}")
        await _install(npm, sources, folder, name)
    return NodeProgram(node, folder / name, f"{package} {version}")


def _pinned(sources: Path, package: str) -> str:
    listed = msgspec.json.decode((sources / "package.json").read_bytes())
    return str(listed["dependencies"][package])


def _npm(node: Path) -> list[str]:
    """npm's own command, or the script that came with this node."""
    found = shutil.which("npm")
    if found:
        return [found]
    script = node.parent.parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    if not script.exists():
        raise NodeUnusable(f"Node is here ({node}) but npm is not")
    return [str(node), str(script)]


async def _install(npm: Sequence[str], sources: Path, folder: Path, name: str) -> None:
    draft = folder / f".{name}.{secrets.token_hex(4)}"
    try:
        await asyncio.to_thread(shutil.copytree, sources, draft)
        await _run_npm(npm, draft)
        with contextlib.suppress(OSError):  # another process was quicker
            draft.rename(folder / name)
    finally:
        await asyncio.to_thread(shutil.rmtree, draft, ignore_errors=True)


async def _run_npm(npm: Sequence[str], folder: Path) -> None:
    lines: list[str] = []
    async with _child([*npm, *_NPM_WORDS, *_NPM_QUIET], folder, {}) as process:
        try:
            async with asyncio.timeout(_NPM_WITHIN_S):
                lines = [line async for line in output_lines(process)]
                code = await process.wait()
        except TimeoutError:
            raise NodeUnusable(f"npm was not done after {_NPM_WITHIN_S:g} s") from None
    if code:
        said = next((line for line in lines if line.strip()), "it said nothing")
        raise NodeUnusable(f"npm could not bring the package ({said.strip()})")


@asynccontextmanager
async def _child(
    command: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that ends with this block, and with this process whatever happens to it."""
    process = await asyncio.create_subprocess_exec(
        *tied(command, dies_by=signal.SIGKILL),
        cwd=folder,
        env={**process_environment(), **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        await _ended(process)


async def _ended(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, patience, SIGKILL; to its whole group, since npm may have started others."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _ENDS_WITHIN_S)
