"""The task `tool`: run a command or make an HTTP call that the operator's TOML file allows.

    [tools.disk]
    command = ["df", "-h", "{path}"]          # no shell; {path} is always a single argument
    args.path = "/[a-z/]*"                    # a pattern for the whole value
    folders = ["/srv", "/home"]               # the folders that absolute paths may lead to
    timeout_s = 10

    [tools.weather]
    url = "https://weather.example/v1/{city}?units=metric"
    args.city = "[A-Za-z ]{1,40}"

Nothing else can be done. Without a pattern of its own, an argument may contain letters, digits and
a few harmless characters, and must not begin with a dash, which would make it an option. Whatever
its pattern permits, an argument of a command must not contain `..` or an absolute path outside of
`folders`, and an argument within the path of a URL must be one segment of that path. What follows
the letters of short options from a slash on (`-vf/x`) counts as an absolute path.

A command gets no shell and no input, only PATH and the environment of the file, a folder of its
own, a time limit and an output limit. Everything that it started ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import string
import tempfile
import time
import tomllib
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import msgspec

from tenure.core.errors import UsageError
from tenure.core.outcome import Fatal, Retry
from tenure.core.process import read_head, running
from tenure.core.redaction import Redaction
from tenure.egress import Client, EgressError, Limits, RequestRefused, RequestTimedOut, Unguarded
from tenure.tasks.model import RunningJob, hide, read, refusal, split_login

_PATH = "/usr/local/bin:/usr/bin:/bin"
_ERROR_CHARS_MAX = 500
_PLAIN_VALUE = r"[\w.,:@/+=][\w.,:@/+= -]{0,255}"
_UP = re.compile(r"(?<![\w.-])\.\.(?![\w.-])")
# What a program may read as an absolute path, also within `--out=/x` and `@/x`. URLs are removed.
_WEB = re.compile(r"(?i)\bhttps?://(?=[^/\s])")
_ABSOLUTE = re.compile(r"(?<![\w./-])[/~\\][^\s,;:=@'\"]*")
_SHORT_OPTIONS = re.compile(r"(?s)-\w+([/~\\].*)")
_NOT_A_SEGMENT = re.compile(r"[/\\\x00-\x1f\x7f]|\A\.{0,2}(;.*)?\Z")
_SURROGATE = re.compile("[\ud800-\udfff]")
_DECODE_TIMES = 3  # some servers decode a path more than once


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

    def hide_in_error(self, text: str) -> str:
        """An error for the requester, without the operator's address, headers and environment."""
        parts = urlsplit(self.url)
        address = [self.url, parts.netloc, parts.netloc.rpartition("@")[2]]
        values = [value for _, value in self._values()]
        return hide(text, _forms([*address, *values, *self._logins()]))

    def hide_in_result(self, result: Any) -> Any:
        """A result for the requester, without the operator's passwords and keys.

        Other values of headers, query and environment are ordinary words, such as `units=metric`.
        """
        redaction = Redaction()
        keys = [
            value
            for name, value in self._values()
            if redaction.is_secret(name) or "key" in name.lower() or redaction.text(value) != value
        ]
        secrets = _forms([*keys, *self._logins()])
        if not secrets:
            return result
        try:
            return _map_strings(result, lambda text: hide(text, secrets), keys=True)
        except RecursionError:
            raise Fatal("its answer is nested too deeply to be searched for secrets") from None

    def _values(self) -> list[tuple[str, str]]:
        """Names and values of query, headers and environment."""
        query = [pair.partition("=")[::2] for pair in urlsplit(self.url).query.split("&")]
        plain = [(name, unquote(value)) for name, value in query]
        return [*query, *plain, *self.headers.items(), *self.env.items()]

    def _logins(self) -> list[str]:
        parts = urlsplit(self.url)
        user, password = (unquote(part or "") for part in (parts.username, parts.password))
        return [parts.password or "", password, f"{user}:{password}"] if password else []


def _forms(values: list[str]) -> set[str]:
    """The values, also without `Bearer`, and in Base64, as a login is sent."""
    plain = {form for value in values for form in (value, value.rpartition(" ")[2]) if form}
    coded = [code(form.encode()) for form in plain for code in (b64encode, urlsafe_b64encode)]
    return plain | {form.decode().rstrip("=") for form in coded}


class _File(msgspec.Struct, forbid_unknown_fields=True):
    tools: dict[str, Tool] = {}


def load_tools(path: Path) -> dict[str, Tool]:
    """Read and check the file; raises with the first fault and its tool."""
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
    """The arguments as text; the whole of each matches its pattern."""
    if set(given) != set(tool.args):
        declared, got = (", ".join(sorted(names)) or "none" for names in (tool.args, given))
        got = got.encode(errors="backslashreplace").decode()
        raise Fatal(f"this tool takes these arguments: {declared}; given were: {got}")
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
    """The template with its arguments; `{{` and `}}` are literal braces.

    >>> _fill("--since={day} {{x}}", {"day": "2 May"})
    '--since=2 May {x}'
    """
    return template.format_map(values)


def _fill_command(tool: Tool, values: Mapping[str, str]) -> list[str]:
    """The command with its arguments; none of them may lead out of the folders of the tool."""
    for name, value in values.items():
        paths = _paths(value)
        if value.startswith("-"):  # an option may be written together with its value
            paths += _paths(value[2:]) + _SHORT_OPTIONS.findall(value)
            paths += [f"{tool.cwd}/{value[2:]}"] if tool.cwd else []
        if tool.cwd and not paths:
            paths = [f"{tool.cwd}/{value}"]
        if _UP.search(value) or not all(_inside(path, tool) for path in paths):
            raise _forbidden_path(name)
    argv = []
    for template in tool.command:
        filled = _fill(template, values)
        added = set(_paths(filled)) - set(_paths(template))
        if not tool.folders:  # then paths that the operator's template begins are permitted
            own = tuple(path.partition("{")[0] for path in _paths(template))
            own = tuple(path for path in own if path.strip("/"))
            added = {path for path in added if not path.startswith(own)}
        if _UP.search(filled) and not _UP.search(template):
            raise _forbidden_path(template)
        if not all(_inside(path, tool) for path in added):
            raise _forbidden_path(template)
        argv.append(filled)
    return argv


def _paths(text: str) -> list[str]:
    return _ABSOLUTE.findall(_WEB.sub("", text))


def _inside(path: str, tool: Tool) -> bool:
    """Whether a path is in a folder of the tool, links followed."""
    roots = [Path(root).resolve() for root in (*tool.folders, tool.cwd) if root]
    return path.startswith("/") and any(Path(path).resolve().is_relative_to(r) for r in roots)


def _forbidden_path(name: str) -> Fatal:
    return Fatal(
        f"argument {name!r} would lead to a path that this tool may not use: an argument holds no "
        '".." and no absolute path outside of the folders that the tools file allows'
    )


def _fill_url(template: str, values: Mapping[str, str]) -> str:
    """The URL with its arguments escaped: none can add a path, a query or a host.

    >>> _fill_url("http://h/v1/{name}?q={q}", {"name": "x?y", "q": "../a&b"})
    'http://h/v1/x%3Fy?q=..%2Fa%26b'
    """
    for segment in urlsplit(template).path.split("/"):
        plain = _fill(segment, values)
        for _ in range(_DECODE_TIMES):
            plain = unquote(plain)
        if _fields(segment) and _NOT_A_SEGMENT.search(plain):
            raise Fatal(
                "an argument within the path of a URL is one segment of it: not empty, without "
                'slashes, and neither "." nor ".."'
            )
    return template.format_map({name: quote(value, safe="") for name, value in values.items()})


def _map_strings(value: Any, change: Callable[[str], str], *, keys: bool = False) -> Any:
    """The JSON value with every string changed, at any depth; with `keys` those of objects too."""
    match value:
        case str():
            return change(value)
        case dict():
            return {
                change(key) if keys else key: _map_strings(value[key], change, keys=keys)
                for key in value
            }
        case list():
            return [_map_strings(item, change, keys=keys) for item in value]
        case _:
            return value


def _templates(tool: Tool) -> list[str]:
    texts = [*tool.command, tool.url]

    def collect(text: str) -> str:
        texts.append(text)
        return text

    _map_strings(tool.body, collect)
    return texts


def _fields(text: str) -> list[str]:
    """The names in braces. Only plain names are permitted: `{a.b}` and `{a!r}` read attributes."""
    names = []
    for _, field, spec, conversion in string.Formatter().parse(text):
        if field is not None:
            plain = field.isidentifier() and not spec and not conversion
            names.append(field if plain else f"{field or ''} (not a plain name)")
    return names


class _Call(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    tool: str
    args: dict[str, str | int | float | bool] = {}


async def use_tool(job: RunningJob, tools: dict[str, Tool]) -> dict[str, Any]:
    """Use the tool that the payload names, with the arguments it gives."""
    request = read(job.payload, _Call, "tool")
    tool = tools.get(request.tool)
    if tool is None:
        allowed = ", ".join(sorted(tools)) or "none"
        raise Fatal(f"there is no tool {request.tool!r}; the tools file allows: {allowed}")
    values = _checked_args(tool, request.args)
    await job.report(None, "tool", type="progress", data={"tool": request.tool})
    started = time.monotonic()
    try:
        result = await (_run(tool, values) if tool.command else _call(tool, values))
        result = tool.hide_in_result(result)
    except (Fatal, Retry) as error:
        # Requesters must not see the operator's address, headers and environment.
        text = tool.hide_in_error(f"tool {request.tool!r}: {error}")
        error.args = (Redaction().text(text),)
        raise
    return {"tool": request.tool, **result, "seconds": round(time.monotonic() - started, 3)}


async def _run(tool: Tool, values: dict[str, str]) -> dict[str, Any]:
    argv = _fill_command(tool, values)
    env = {"PATH": _PATH, **tool.env}
    with contextlib.ExitStack() as stack:
        cwd = tool.cwd or stack.enter_context(tempfile.TemporaryDirectory(prefix="tenure-tool-"))
        try:
            async with running(argv, cwd=cwd, env=env, separate_stderr=True) as process:
                async with asyncio.timeout(tool.timeout_s):
                    (stdout, out_cut), (stderr, err_cut) = await asyncio.gather(
                        read_head(process.stdout, tool.output_bytes_max),
                        read_head(process.stderr, tool.output_bytes_max),
                    )
                    code = await process.wait()
        except TimeoutError:
            raise Fatal(f"it took longer than its {tool.timeout_s:g} s") from None
        except OSError as error:
            raise Fatal(f"its program cannot be run: {error.strerror}") from None
    errors = stderr.decode(errors="replace")
    if code not in tool.ok_exit_codes:
        # Secrets are hidden before the text is cut, so that no part of one stays.
        end = tool.hide_in_error(errors).strip()[-_ERROR_CHARS_MAX:]
        raise Fatal(f"it ended with {code}: {end or 'it printed nothing'}")
    output = stdout.decode(errors="replace")
    return {"exit_code": code, "stdout": output, "stderr": errors, "truncated": out_cut or err_cut}


async def _call(tool: Tool, values: dict[str, str]) -> dict[str, Any]:
    url, login = split_login(_fill_url(tool.url, values))
    body = _map_strings(tool.body, lambda text: _fill(text, values))
    content = b"" if body is None else msgspec.json.encode(body)
    kind = {"Content-Type": "application/json"} if content else {}
    client = Client(
        Unguarded(), limits=Limits(5_000, round(tool.timeout_s * 1000), tool.output_bytes_max)
    )
    try:
        headers = list((kind | login | tool.headers).items())
        answer = await client.send(tool.method, url, headers=headers, body=content)
    except RequestTimedOut:
        raise Retry(None, f"it took longer than its {tool.timeout_s:g} s") from None
    except RequestRefused as error:
        raise Fatal(f"its URL with these arguments cannot be called: {error}") from None
    except EgressError as error:
        raise Retry(None, f"its server could not be reached: {error}") from None
    finally:
        await client.close()
    if answer.status >= 300:
        raise refusal(answer.status, answer.headers, answer.body[:2000], "its server")
    result: Any = answer.body.decode(errors="replace")
    if "json" in answer.headers.get("content-type", ""):
        with contextlib.suppress(msgspec.DecodeError):
            result = msgspec.json.decode(answer.body)
    return {"status": answer.status, "body": result, "truncated": answer.truncated}
