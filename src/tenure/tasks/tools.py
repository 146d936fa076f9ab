"""`tool`: run a command or make an HTTP call that the TOML file of the operator allows.

    [tools.disk]
    command = ["df", "-h", "{path}"]          # no shell; {path} fills one argument, never two
    args.path = "/[a-z/]*"                    # a pattern that the whole value must match
    folders = ["/srv", "/home"]               # where an absolute path of an argument may lead
    timeout_s = 10

    [tools.weather]
    url = "https://weather.example/v1/{city}?units=metric"
    args.city = "[A-Za-z ]{1,40}"

What is not in the file cannot be done. An argument without a pattern of its own may hold letters,
digits and a few harmless signs, and never begins with a dash (it would be taken for an option).
Whatever its pattern says, an argument of a command holds no `..` and no absolute path outside of
`folders`, and an argument within the path of a URL is one segment of that path.

A command gets no shell, no input, no environment but PATH and what the file gives it, a folder of
its own, a time limit and a limit on its output. When it ends, so does everything it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import string
import tempfile
import time
import tomllib
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import httpx2
import msgspec

from tenure.core.errors import UsageError
from tenure.core.outcome import Fatal, Retry
from tenure.core.redaction import Redaction
from tenure.tasks.model import Running, read, refusal
from tenure.vault import Secret, hide, without_secrets

_PATH = "/usr/local/bin:/usr/bin:/bin"
_ERROR_CHARS_MAX = 500
_PLAIN_VALUE = r"[\w.,:@/+=][\w.,:@/+= -]{0,255}"
_UP = re.compile(r"(?<![\w.-])\.\.(?![\w.-])")
# What a program may take for an absolute path, also within `--out=/x` and `@/x`; a URL is none.
_WEB = re.compile(r"(?i)\bhttps?://(?=[^/\s])")
_ABSOLUTE = re.compile(r"(?<![\w./-])[/~\\][^\s,;:=@'\"]*")
_NO_SEGMENT = re.compile(r"[/\\\x00-\x1f\x7f]|\A\.{0,2}(;.*)?\Z")
_SURROGATE = re.compile("[\ud800-\udfff]")
_DECODED_TIMES = 3  # some servers decode a path more than once


class Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the file: a command or a URL, and its limits."""

    command: list[str] = []
    url: str = ""
    method: str = "GET"
    headers: dict[str, str] = {}
    body: Any = None
    args: dict[str, str] = {}
    description: str = ""
    timeout_s: float = 30.0
    output_bytes_max: int = 65_536
    cwd: str = ""
    folders: list[str] = []
    env: dict[str, str] = {}
    ok_exit_codes: tuple[int, ...] = (0,)

    def without_secrets(self, text: str) -> str:
        """Text for the requester, without what is the operator's: address, headers, environment."""
        parts = urlsplit(self.url)
        place = [self.url, parts.netloc, parts.netloc.rpartition("@")[2]]
        own = [value for _, value in self._given()]
        return without_secrets(text, _secrets([*place, *own, *self._logins()]))

    def result_without_secrets(self, made: Any) -> Any:
        """A result for the requester, without the passwords and keys of the operator.

        Other values of headers, query and environment are ordinary words: `units=metric`.
        """
        usual = Redaction()
        keys = [
            value
            for name, value in self._given()
            if usual.is_secret(name) or "key" in name.lower() or usual.text(value) != value
        ]
        secrets = _secrets([*keys, *self._logins()])
        try:
            return _without(secrets, made) if secrets else made
        except RecursionError:
            raise Fatal("its answer is nested too deeply to be searched for secrets") from None

    def _given(self) -> list[tuple[str, str]]:
        query = [pair.partition("=")[::2] for pair in urlsplit(self.url).query.split("&")]
        plain = [(name, unquote(value)) for name, value in query]
        return [*query, *plain, *self.headers.items(), *self.env.items()]

    def _logins(self) -> list[str]:
        parts = urlsplit(self.url)
        user, password = (unquote(part or "") for part in (parts.username, parts.password))
        return [parts.password or "", password, f"{user}:{password}"] if password else []


def _secrets(values: list[str]) -> list[Secret]:
    """The values, longest first: also without `Bearer`, and in Base64, as a login is sent."""
    words = {word for value in values for word in (value, value.rpartition(" ")[2]) if word}
    forms = [form(word.encode()) for word in words for form in (b64encode, urlsafe_b64encode)]
    words |= {form.decode().rstrip("=") for form in forms}
    return [Secret(word) for word in sorted(words, key=len, reverse=True)]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    tools: dict[str, Tool] = {}


def load_tools(path: Path) -> dict[str, Tool]:
    """Read and check the file; the first fault is named with its tool."""
    try:
        tools = msgspec.convert(tomllib.loads(path.read_text()), _File).tools
    except OSError as error:
        raise UsageError(f"the tools file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise UsageError(f"the tools file {path} is not right: {error}") from None
    for name, tool in tools.items():
        fault = _fault(tool)
        if fault:
            raise UsageError(f"the tools file {path}: tool {name!r} {fault}")
    return tools


def _fault(tool: Tool) -> str:
    if bool(tool.command) == bool(tool.url):
        return 'needs either "command" or "url"'
    if tool.timeout_s <= 0 or tool.output_bytes_max < 1:
        return "needs limits above 0"
    if not all(Path(folder).is_absolute() for folder in (*tool.folders, tool.cwd or "/")):
        return "needs absolute paths in `folders` and `cwd`"
    try:
        for pattern in tool.args.values():
            re.compile(pattern)
    except re.error as error:
        return f"has a pattern that is none: {error}"
    if tool.command and "{" in tool.command[0]:
        return "must name its program itself, not by an argument"
    parts = urlsplit(tool.url)
    if tool.url and (
        parts.scheme not in ("http", "https") or "{" in parts.netloc or not parts.hostname
    ):
        return "needs a URL with http or https and a fixed host"
    undeclared = {field for text in _templates(tool) for field in _fields(text)} - set(tool.args)
    return f"uses {{{min(undeclared)}}}, which `args` does not declare" if undeclared else ""


def _checked_args(tool: Tool, given: Mapping[str, Any]) -> dict[str, str]:
    """The arguments as text, each matched against its pattern as a whole."""
    if set(given) != set(tool.args):
        wanted, got = (", ".join(sorted(names)) or "none" for names in (tool.args, given))
        got = got.encode(errors="backslashreplace").decode()
        raise Fatal(f"this tool takes these arguments: {wanted}; given were: {got}")
    values: dict[str, str] = {}
    for name, raw in given.items():
        text = str(raw).lower() if isinstance(raw, bool) else str(raw)
        pattern = tool.args[name] or _PLAIN_VALUE
        if "\0" in text or re.fullmatch(pattern, text) is None:
            raise Fatal(f"argument {name!r} is {text[:60]!r}, which does not match {pattern!r}")
        if _SURROGATE.search(text):
            raise Fatal(f"argument {name!r} is {text[:60]!r}, which is no Unicode text")
        values[name] = text
    return values


def _fill(template: str, values: Mapping[str, str]) -> str:
    """The template with its arguments; `{{` and `}}` stand for braces.

    >>> _fill("--since={day} {{x}}", {"day": "2 May"})
    '--since=2 May {x}'
    """
    return template.format_map(values)


def _fill_command(tool: Tool, values: Mapping[str, str]) -> list[str]:
    """The command with its arguments, none of which leads out of the folders of the tool."""
    for name, value in values.items():
        paths = _paths(value)
        if value.startswith("-"):  # an option may be written together with its value
            paths += _paths(value[2:])
            paths += [f"{tool.cwd}/{value[2:]}"] if tool.cwd else []
        if tool.cwd and not paths:
            paths = [f"{tool.cwd}/{value}"]
        if _UP.search(value) or not all(_inside(path, tool) for path in paths):
            raise _astray(name)
    argv = []
    for template in tool.command:
        filled = _fill(template, values)
        added = set(_paths(filled)) - set(_paths(template))
        if not tool.folders:  # then the operator's own folders count, not those of an argument
            own = tuple(path.partition("{")[0] for path in _paths(template))
            own = tuple(path for path in own if path.strip("/"))
            added = {path for path in added if not path.startswith(own)}
        if _UP.search(filled) and not _UP.search(template):
            raise _astray(template)
        if not all(_inside(path, tool) for path in added):
            raise _astray(template)
        argv.append(filled)
    return argv


def _paths(text: str) -> list[str]:
    return _ABSOLUTE.findall(_WEB.sub("", text))


def _inside(path: str, tool: Tool) -> bool:
    """Whether a path lies in a folder of the tool, links followed."""
    roots = [Path(root).resolve() for root in (*tool.folders, tool.cwd) if root]
    return path.startswith("/") and any(Path(path).resolve().is_relative_to(r) for r in roots)


def _astray(name: str) -> Fatal:
    return Fatal(
        f"argument {name!r} would lead to a path that this tool may not use: an argument holds no "
        '".." and no absolute path outside of the folders that the tools file allows'
    )


def _fill_url(template: str, values: Mapping[str, str]) -> str:
    """The URL with its arguments escaped, so that none can add a path, a query or a host.

    >>> _fill_url("http://h/v1/{name}?q={q}", {"name": "x?y", "q": "../a&b"})
    'http://h/v1/x%3Fy?q=..%2Fa%26b'
    """
    for segment in urlsplit(template).path.split("/"):
        plain = _fill(segment, values)
        for _ in range(_DECODED_TIMES):
            plain = unquote(plain)
        if _fields(segment) and _NO_SEGMENT.search(plain):
            raise Fatal(
                "an argument within the path of a URL is one segment of it: not empty, without "
                'slashes, and neither "." nor ".."'
            )
    return template.format_map({name: quote(value, safe="") for name, value in values.items()})


def _fill_body(body: Any, values: Mapping[str, str]) -> Any:
    """The body with arguments filled into its texts, at any depth."""
    match body:
        case str():
            return _fill(body, values)
        case dict():
            return {key: _fill_body(value, values) for key, value in body.items()}
        case list():
            return [_fill_body(value, values) for value in body]
        case _:
            return body


def _without(secrets: list[Secret], made: Any) -> Any:
    match made:
        case str():
            return hide(made, secrets)
        case dict():
            return {hide(key, secrets): _without(secrets, made[key]) for key in made}
        case list():
            return [_without(secrets, value) for value in made]
        case _:
            return made


def _templates(tool: Tool) -> list[str]:
    texts = [*tool.command, tool.url]
    waiting = [tool.body]
    while waiting:
        body = waiting.pop()
        if isinstance(body, str):
            texts.append(body)
        elif isinstance(body, dict):
            waiting += body.values()
        elif isinstance(body, list):
            waiting += body
    return texts


def _fields(text: str) -> list[str]:
    """The names in braces. Only plain names: `{a.b}` and `{a!r}` reach into objects."""
    names = []
    for _, field, spec, conversion in string.Formatter().parse(text):
        if field is not None:
            plain = field.isidentifier() and not spec and not conversion
            names.append(field if plain else f"{field or ''} (not a plain name)")
    return names


class _Call(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    tool: str
    args: dict[str, str | int | float | bool] = {}


async def use_tool(job: Running, tools: dict[str, Tool]) -> dict[str, Any]:
    """Use the tool that the payload names, with the arguments it gives."""
    asked = read(job.payload, _Call, "tool")
    tool = tools.get(asked.tool)
    if tool is None:
        allowed = ", ".join(sorted(tools)) or "none"
        raise Fatal(f"there is no tool {asked.tool!r}; the tools file allows: {allowed}")
    values = _checked_args(tool, asked.args)
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
    argv = _fill_command(tool, values)
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
    url = _fill_url(tool.url, values)
    content = None if tool.body is None else msgspec.json.encode(_fill_body(tool.body, values))
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
                raise refusal(response, body[:2000], "its server")
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
