"""The allow-list of the task `tool`: a TOML file that says what may be run or called.

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
"""

from __future__ import annotations

import re
import string
import tomllib
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import msgspec

from tenure.core.errors import UsageError
from tenure.core.outcome import Fatal
from tenure.core.redaction import Redaction
from tenure.vault.secret import Secret, hide, without_secrets

PLAIN_VALUE = r"[\w.,:@/+=][\w.,:@/+= -]{0,255}"
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


def checked_args(tool: Tool, given: Mapping[str, Any]) -> dict[str, str]:
    """The arguments as text, each matched against its pattern as a whole."""
    if set(given) != set(tool.args):
        wanted, got = (", ".join(sorted(names)) or "none" for names in (tool.args, given))
        got = got.encode(errors="backslashreplace").decode()
        raise Fatal(f"this tool takes these arguments: {wanted}; given were: {got}")
    values: dict[str, str] = {}
    for name, raw in given.items():
        text = str(raw).lower() if isinstance(raw, bool) else str(raw)
        pattern = tool.args[name] or PLAIN_VALUE
        if "\0" in text or re.fullmatch(pattern, text) is None:
            raise Fatal(f"argument {name!r} is {text[:60]!r}, which does not match {pattern!r}")
        if _SURROGATE.search(text):
            raise Fatal(f"argument {name!r} is {text[:60]!r}, which is no Unicode text")
        values[name] = text
    return values


def fill(template: str, values: Mapping[str, str]) -> str:
    """The template with its arguments; `{{` and `}}` stand for braces.

    >>> fill("--since={day} {{x}}", {"day": "2 May"})
    '--since=2 May {x}'
    """
    return template.format_map(values)


def fill_command(tool: Tool, values: Mapping[str, str]) -> list[str]:
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
        filled = fill(template, values)
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


def fill_url(template: str, values: Mapping[str, str]) -> str:
    """The URL with its arguments escaped, so that none can add a path, a query or a host.

    >>> fill_url("http://h/v1/{name}?q={q}", {"name": "x?y", "q": "../a&b"})
    'http://h/v1/x%3Fy?q=..%2Fa%26b'
    """
    for segment in urlsplit(template).path.split("/"):
        plain = fill(segment, values)
        for _ in range(_DECODED_TIMES):
            plain = unquote(plain)
        if _fields(segment) and _NO_SEGMENT.search(plain):
            raise Fatal(
                "an argument within the path of a URL is one segment of it: not empty, without "
                'slashes, and neither "." nor ".."'
            )
    return template.format_map({name: quote(value, safe="") for name, value in values.items()})


def fill_body(body: Any, values: Mapping[str, str]) -> Any:
    """The body with arguments filled into its texts, at any depth."""
    match body:
        case str():
            return fill(body, values)
        case dict():
            return {key: fill_body(value, values) for key, value in body.items()}
        case list():
            return [fill_body(value, values) for value in body]
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
