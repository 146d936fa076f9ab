"""Settings and where they come from: flags over TENURE_* over tenure.toml over defaults.

Only this module and `cli/config.py`, which has the table of all settings, read the environment and
settings files. `worker.concurrency` is `TENURE_WORKER_CONCURRENCY` in the environment and
`concurrency` of the table `[worker]` in tenure.toml. A setting that may contain a secret (keys,
URLs) can be read from a file, which `TENURE_LLM_KEY_FILE` or systemd's
LoadCredential=TENURE_LLM_KEY names.

`[queues.mail]` with a `url` names a queue. Clients, workers and commands take `mail` wherever they
take a URL. A running `tenure up` writes `up.json` into its data folder, so that other programs find
its queues.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from tenure.core.errors import UsageError

_Kind = Literal["text", "integer", "number", "list"]
_Value = str | int | float | list[str]

_PREFIX = "TENURE_"
DEFAULT_CONTRACT = "streams"

DATA_FOLDER = ".tenure"
"""The default of the setting `data`."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. The default "" means that a text is not set.

    `alias` is a variable that a contract names; ours wins over it.
    """

    name: str
    default: _Value
    help: str
    kind: _Kind = "text"
    secret: bool = False
    alias: str = ""

    @property
    def sensitive(self) -> bool:
        """Whether it may contain a secret, and so may be read from a file."""
        return self.secret or self.name.endswith(("url", "queues"))

    @property
    def is_queue(self) -> bool:
        """Whether its values are queues: URLs, or names of queues in tenure.toml."""
        return self.name == "queue_url" or self.name.endswith(".queues")

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return _PREFIX + re.sub(r"[.-]", "_", self.name).upper()


QUEUE_URL = Setting(
    "queue_url", f"{DEFAULT_CONTRACT}+redis://127.0.0.1:6379/0", "the queue to use by default"
)
DATA = Setting("data", DATA_FOLDER, "the folder in which `tenure up` keeps its data")
_OWN = {setting.name: setting for setting in (QUEUE_URL, DATA)}
_FILE_NAME = "tenure.toml"
UP = "`tenure up`"
_QUEUE_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")
_QUEUE_SETTING = re.compile(rf"queues\.{_QUEUE_NAME.pattern}\.url(_file)?")


@dataclass(frozen=True, slots=True)
class Found:
    """A setting's value and where it was found."""

    value: _Value
    origin: str


class Config:
    """The settings of this process; a flag wins over all other sources.

    A setting that names queues answers with their URLs.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        folder: Path,
        settings: Mapping[str, Setting] | None = None,
    ) -> None:
        self._environment = environment
        self._folder = folder
        self._settings = _OWN if settings is None else settings
        self._file, self._table = _read_file(environment, folder)

    def find(self, name: str, flag: _Value | None = None) -> Found:
        """The value of a setting and its origin."""
        setting = self._settings[name]
        if flag is not None and flag != []:
            found = Found(flag, "flag")
        else:
            found = (
                self._from_environment(setting)
                or self._from_file(setting)
                or self._from_running_up(setting)
                or Found(setting.default, "default")
            )
        return self._with_urls(setting, found) if setting.is_queue else found

    def url_of(self, queue: str) -> str:
        """The URL of a queue: the one given, or the one that tenure.toml has under this name."""
        if queue.find("://") > 0:
            return queue
        setting = Setting(f"queues.{queue}.url", "", "")
        found = self._from_environment(setting) or self._from_file(setting)
        if found is None or not _QUEUE_NAME.fullmatch(queue):
            raise UsageError(
                f"{queue[:200]!r} is not a queue URL, such as {DEFAULT_CONTRACT}+redis://"
                f"localhost:6379/0, and not the name of a queue in {self._file} ({self._names()})"
            )
        return str(found.value)

    def _with_urls(self, setting: Setting, found: Found) -> Found:
        value = found.value
        try:
            if isinstance(value, list):
                return Found([self.url_of(each) for each in value], found.origin)
            return Found(self.url_of(str(value)), found.origin)
        except UsageError as error:
            where = "" if found.origin == "flag" else f"{setting.name} ({found.origin}): "
            raise UsageError(f"{where}{error}") from None

    def _names(self) -> str:
        names = sorted({name.split(".")[1] for name in self._table if name.startswith("queues.")})
        return f"there are: {', '.join(names)}" if names else "it names none"

    def text(self, name: str, flag: str | None = None) -> str:
        return str(self.find(name, flag).value)

    def integer(self, name: str, flag: int | None = None) -> int:
        return int(cast("int", self.find(name, flag).value))

    def number(self, name: str, flag: float | None = None) -> float:
        return float(cast("float", self.find(name, flag).value))

    def texts(self, name: str, flag: tuple[str, ...] = ()) -> list[str]:
        return list(cast("list[str]", self.find(name, list(flag)).value))

    def is_set(self, name: str) -> bool:
        """Whether a flag, variable or file sets this."""
        return self.find(name).origin != "default"

    @property
    def data(self) -> Path:
        """The data folder, absolute."""
        return (self._folder / Path(self.text("data")).expanduser()).absolute()

    def _from_environment(self, setting: Setting) -> Found | None:
        name = setting.variable
        if text := self._environment.get(name):
            return Found(_parse(setting, text, name), f"environment {name}")
        if setting.alias and (text := self._environment.get(setting.alias)):
            return Found(_parse(setting, text, setting.alias), f"environment {setting.alias}")
        if not setting.sensitive:
            return None
        if path := self._environment.get(f"{name}_FILE"):
            return Found(_read_secret(setting, path, f"{name}_FILE"), f"environment {name}_FILE")
        credentials = self._environment.get("CREDENTIALS_DIRECTORY")
        if credentials and (Path(credentials) / name).is_file():
            found = _read_secret(setting, f"{credentials}/{name}", name)
            return Found(found, f"credential {name}")
        return None

    def _from_file(self, setting: Setting) -> Found | None:
        if setting.name in self._table:
            return Found(
                _parse(setting, self._table[setting.name], str(self._file)), str(self._file)
            )
        path = self._table.get(f"{setting.name}_file") if setting.sensitive else None
        origin = str(self._file)
        return Found(_read_secret(setting, str(path), origin), origin) if path else None

    def _from_running_up(self, setting: Setting) -> Found | None:
        if setting.name not in ("queue_url", "redis_url"):
            return None
        up = running_up(self.data)
        return Found(getattr(up, setting.name), f"{UP} in {self.data}") if up else None


def queue_url(queue: str | None = None) -> str:
    """The URL of a queue by its name in tenure.toml; by default, of the configured queue."""
    return Config(os.environ, Path.cwd()).text("queue_url", queue)


def _read_file(environment: Mapping[str, str], folder: Path) -> tuple[Path, dict[str, Any]]:
    named = environment.get("TENURE_CONFIG")
    path = folder / Path(named or _FILE_NAME).expanduser()
    if not path.exists():
        if named:
            raise UsageError(f"TENURE_CONFIG names {path}, which does not exist")
        return path, {}
    import tomllib

    try:
        table = _flat(tomllib.loads(_read_trusted(path, chosen=bool(named))))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    for name in table:
        if name.startswith("queues.") and not _QUEUE_SETTING.fullmatch(name):
            raise UsageError(
                f"{path}: {name!r} says nothing about a queue; write [queues.NAME] and url = ..., "
                "or url_file = ..., with a NAME of letters, digits, _ and -"
            )
    return path, table


def _read_trusted(path: Path, *, chosen: bool) -> str:
    """The text of a regular file; raises if other users could have written it.

    Settings decide where jobs and secrets are sent. `chosen` means that the user named the file.
    """

    def at_once(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)  # opening a FIFO would wait for a writer

    with open(path, encoding="utf-8", opener=at_once) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(f"{path} is no regular file; settings and secrets are read from one")
        why = why_untrusted(found, chosen=chosen)
        if not chosen and not why:
            why = why_untrusted(path.lstat())  # another user's link to a file of ours
        if why:
            named = "" if chosen else " (one that TENURE_CONFIG names may be another user's)"
            raise UsageError(
                f"{path} {why}, who could send jobs and secrets elsewhere; it must be yours or "
                f"root's{named}, and not open to all: `chmod o-w {path}`"
            )
        if not chosen and found.st_mode & stat.S_IWGRP and found.st_gid != os.getegid():
            from tenure.core.encoding import printable

            warning = f"warning: {path} can be written by group {found.st_gid}: `chmod g-w {path}`"
            sys.stderr.write(printable(warning) + "\n")
        return file.read()


def read_secret_file(path: str) -> str:
    """The text of a file that an option or setting names."""
    return _read_trusted(Path(path).expanduser(), chosen=True).strip()


def why_untrusted(found: os.stat_result, *, chosen: bool = False) -> str:
    """Why other users may have written a file, or put files into a folder; "" if they cannot.

    `chosen`: the user named the path, and thereby trusts its owner.
    """
    if found.st_uid not in {0, os.geteuid()} and not chosen:
        return f"belongs to user {found.st_uid}"
    mode = found.st_mode
    if mode & stat.S_IWOTH and (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return f"can be written by all users (mode {stat.S_IMODE(mode):04o})"
    return ""


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _parse(setting: Setting, raw: Any, where: str) -> _Value:
    try:
        match setting.kind:
            case "text" if isinstance(raw, str):
                return raw
            case "integer" if not isinstance(raw, bool | float) and is_storable(int(raw)):
                return int(raw)
            case "number" if not isinstance(raw, bool) and is_storable(float(raw)):
                return float(raw)
            case "list":
                parts = raw.split("\n" if "\n" in raw else ",") if isinstance(raw, str) else raw
                return [str(part).strip() for part in parts if str(part).strip()]
    except (TypeError, ValueError):
        pass
    raise UsageError(
        f"{where}: {setting.name} is {repr(raw)[:80]}, which is not a valid {setting.kind}"
    )


def is_storable(number: float) -> bool:
    """Whether stores and clocks can represent this number.

    >>> [is_storable(number) for number in (0, -1.5, 2**53, float("inf"), float("nan"), 10**400)]
    [True, True, True, False, False, False]
    """
    return abs(number) <= 2**53


def _read_secret(setting: Setting, path: str, where: str) -> _Value:
    """The value in a file; a list has one line per item."""
    try:
        text = read_secret_file(path)
    except OSError as error:
        raise UsageError(f"{where}: the secret's file cannot be read: {error}") from None
    return _parse(setting, text.splitlines() if setting.kind == "list" else text, where)


UP_FILE = "up.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningUp:
    """The process and the addresses of a running `tenure up`.

    `queue_url` is the first of the `queues` that its worker serves.
    """

    pid: int
    gateway_url: str
    queue_url: str
    redis_url: str
    started_ms: int
    queues: list[str] = field(default_factory=list)


def running_up(folder: Path) -> RunningUp | None:
    """The `tenure up` that uses this data folder, if its process is alive.

    A file of another user is ignored: it could send our jobs to a store of theirs.
    """
    import msgspec

    try:
        with (folder / UP_FILE).open("rb") as file:
            is_ours = os.fstat(file.fileno()).st_uid == os.geteuid()
            up = msgspec.json.decode(file.read(), type=RunningUp)
    except (OSError, msgspec.MsgspecError):
        return None
    return up if is_ours and _is_alive(up.pid) else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # another user's process
    return True
