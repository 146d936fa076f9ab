"""`tool`: run an allow-listed command, or make an allow-listed HTTP call.

A command gets no shell, no input, an empty environment but for PATH and what the file gives it, a
folder of its own, a time limit and a limit on what it may say; when it ends, so does everything it
started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from typing import Any

import httpx2
import msgspec

from tenure.core.outcome import Fatal, Retry
from tenure.tasks import payload as shapes
from tenure.tasks.running import Running
from tenure.tasks.server import refusal
from tenure.tasks.toolbox import Tool, checked_args, fill_body, fill_command, fill_url

_PATH = "/usr/local/bin:/usr/bin:/bin"
_ERROR_CHARS_MAX = 500


async def use_tool(job: Running, tools: dict[str, Tool]) -> dict[str, Any]:
    """Use the tool that the payload names, with the arguments it gives."""
    asked = shapes.read(job.payload, shapes.Tool)
    tool = tools.get(asked.tool)
    if tool is None:
        allowed = ", ".join(sorted(tools)) or "none"
        raise Fatal(f"there is no tool {asked.tool!r}; the tools file allows: {allowed}")
    values = checked_args(tool, asked.args)
    await job.report(None, "tool", type="progress", data={"tool": asked.tool})
    started = time.monotonic()
    try:
        made = await (_run(tool, values) if tool.command else _call(tool, values))
        made = tool.result_without_secrets(made)
    except (Fatal, Retry) as error:
        # The operator's address, headers and environment are not for those who submit jobs.
        error.args = (tool.without_secrets(f"tool {asked.tool!r}: {error}"),)
        raise
    return {"tool": asked.tool, **made, "seconds": round(time.monotonic() - started, 3)}


async def _run(tool: Tool, values: dict[str, str]) -> dict[str, Any]:
    argv = fill_command(tool, values)
    with contextlib.ExitStack() as stack:
        cwd = tool.cwd or stack.enter_context(tempfile.TemporaryDirectory(prefix="tenure-tool-"))
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=cwd,
                env={"PATH": _PATH, **tool.env},
                start_new_session=True,
            )
        except OSError as error:
            raise Fatal(f"its program cannot be run: {error.strerror}") from None
        try:
            async with asyncio.timeout(tool.timeout_s):
                out, err = await asyncio.gather(
                    _read(process.stdout, tool.output_bytes_max),
                    _read(process.stderr, tool.output_bytes_max),
                )
                code = await process.wait()
        except TimeoutError:
            raise Fatal(f"it took longer than its {tool.timeout_s:g} s") from None
        finally:
            await _end_all(process)
    return _ran(tool, code, out, err)


def _ran(tool: Tool, code: int, out: tuple[bytes, bool], err: tuple[bytes, bool]) -> dict[str, Any]:
    said = err[0].decode(errors="replace")
    if code not in tool.ok_exit_codes:
        last = tool.without_secrets(said).strip()[-_ERROR_CHARS_MAX:]  # no part of a secret
        raise Fatal(f"it ended with {code}: {last or 'no words'}")
    return {
        "exit_code": code,
        "stdout": out[0].decode(errors="replace"),
        "stderr": said,
        "truncated": out[1] or err[1],
    }


async def _read(stream: asyncio.StreamReader | None, limit: int) -> tuple[bytes, bool]:
    """The first `limit` bytes. The rest is read and dropped: a full pipe would stop the tool."""
    kept = bytearray()
    cut = False
    while stream is not None and (piece := await stream.read(65_536)):
        room = limit - len(kept)
        cut = cut or len(piece) > room
        kept += piece[: max(room, 0)]
    return bytes(kept), cut


async def _end_all(process: asyncio.subprocess.Process) -> None:
    """End the tool and whatever it started: they share the session that it leads."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await asyncio.shield(process.wait())


async def _call(tool: Tool, values: dict[str, str]) -> dict[str, Any]:
    url = fill_url(tool.url, values)
    content = None if tool.body is None else msgspec.json.encode(fill_body(tool.body, values))
    headers = {"Content-Type": "application/json", **tool.headers} if content else tool.headers
    # trust_env off: a proxy or .netrc of this machine is none of the tool's business.
    client = httpx2.AsyncClient(timeout=tool.timeout_s, follow_redirects=False, trust_env=False)
    try:
        async with (
            asyncio.timeout(tool.timeout_s),
            client,
            client.stream(tool.method, url, content=content, headers=headers) as response,
        ):
            body, cut = await _body(response, tool.output_bytes_max)
            if response.status_code >= httpx2.codes.MULTIPLE_CHOICES:
                said = httpx2.Response(
                    response.status_code, headers=response.headers, content=body[:2000]
                )
                raise refusal(said, "its server")
    except TimeoutError:
        raise Retry(None, f"it took longer than its {tool.timeout_s:g} s") from None
    except httpx2.InvalidURL as error:
        raise Fatal(f"its URL with these arguments cannot be called: {error}") from None
    except httpx2.TransportError as error:
        words = str(error) or type(error).__name__
        raise Retry(None, f"its server could not be reached: {words}") from None
    return {"status": response.status_code, "body": _plain(body, response), "truncated": cut}


async def _body(response: httpx2.Response, limit: int) -> tuple[bytes, bool]:
    kept = bytearray()
    async for piece in response.aiter_bytes():
        kept += piece
        if len(kept) > limit:
            return bytes(kept[:limit]), True
    return bytes(kept), False


def _plain(body: bytes, response: httpx2.Response) -> Any:
    if "json" in response.headers.get("content-type", ""):
        try:
            return msgspec.json.decode(body)
        except msgspec.DecodeError:
            pass
    return body.decode(errors="replace")
