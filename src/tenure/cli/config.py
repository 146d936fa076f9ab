"""Where settings come from: flags over TENURE_* over tenure.toml over defaults.

This module is the only reader of the environment and of settings files; everything else is handed
what it needs. The queue has one source more: a `tenure up` that runs in this folder leaves
`.tenure/up.json`, so that the other commands find it without being told.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tenure.cli.settings import PREFIX, SETTINGS, Setting, Value
from tenure.core.errors import UsageError
from tenure.store.private import why_untrusted

FILE_NAME = "tenure.toml"
_UP = "`tenure up`"
_WATCHDOG = ("WATCHDOG_PID", "WATCHDOG_USEC")


@dataclass(frozen=True, slots=True)
class Found:
    """A setting's value and where it was found."""

    value: Value
    origin: str


class Config:
    """The settings as this process sees them; a flag, where given, wins over all of them."""

    def __init__(self, environment: Mapping[str, str], folder: Path) -> None:
        self._environment = environment
        self._folder = folder
        self._file, self._table = _read_file(environment, folder)

    def find(self, name: str, flag: Value | None = None) -> Found:
        """The value of a setting and its origin."""
        setting = SETTINGS[name]
        if flag is not None and flag != []:
            return Found(flag, "flag")
        return (
            self._from_environment(setting)
            or self._from_file(setting)
            or self._from_running_up(setting)
            or Found(setting.default, "default")
        )

    def text(self, name: str, flag: str | None = None) -> str:
        return str(self.find(name, flag).value)

    def integer(self, name: str, flag: int | None = None) -> int:
        return int(cast("int", self.find(name, flag).value))

    def number(self, name: str, flag: float | None = None) -> float:
        return float(cast("float", self.find(name, flag).value))

    def texts(self, name: str, flag: tuple[str, ...] = ()) -> list[str]:
        return list(cast("list[str]", self.find(name, list(flag)).value))

    def is_set(self, name: str) -> bool:
        """Whether anybody chose this setting."""
        return self.find(name).origin != "default"

    @property
    def data(self) -> Path:
        """The data folder, absolute."""
        return (self._folder / Path(self.text("data")).expanduser()).absolute()

    @property
    def unknown_variables(self) -> list[str]:
        """TENURE_* variables that look like a misspelt setting."""
        known = {setting.variable for setting in SETTINGS.values()}
        known |= {f"{setting.variable}_FILE" for setting in SETTINGS.values() if setting.sensitive}
        import difflib

        strange = [
            name for name in self._environment if name.startswith(PREFIX) and name not in known
        ]
        return sorted(n for n in strange if difflib.get_close_matches(n, known, n=1, cutoff=0.85))

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
        from tenure.cli.running import running_up

        up = running_up(self.data)
        return Found(getattr(up, setting.name), f"{_UP} in {self.data}") if up else None

    def queue_urls(self) -> list[str]:
        """The queues to show: those that were named, else all of a running `tenure up`."""
        from tenure.cli.running import running_up

        named = self.texts("worker.queues")
        found = self.find("queue_url")
        up = None if named or not found.origin.startswith(_UP) else running_up(self.data)
        return named or (up.queues if up else []) or [str(found.value)]


def load_config() -> Config:
    """The configuration of this process."""
    return Config(os.environ, Path.cwd())


def debug_wanted() -> bool:
    """TENURE_DEBUG: show where an error came from."""
    return bool(os.environ.get("TENURE_DEBUG"))


def colours_wanted(stream: Any) -> bool:
    """True on a terminal, unless NO_COLOR is set (no-color.org) or the terminal is dumb."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(stream.isatty())


def browser_possible() -> bool:
    """A person at a desk: a terminal, and somewhere to show a page."""
    seen = (
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or sys.platform == "darwin"
    )
    return bool(seen) and sys.stdout.isatty()


def process_environment() -> Mapping[str, str]:
    """The environment, for the few things that are not settings (POD_NAME)."""
    return os.environ


def child_environment() -> dict[str, str]:
    """What our own children see: ours, with plain text logs unless somebody chose a format.

    systemd's words are for us alone.
    """
    ours = {k: v for k, v in os.environ.items() if k not in ("NOTIFY_SOCKET", *_WATCHDOG)}
    return {"TENURE_LOG_FORMAT": "text", "PYTHONUNBUFFERED": "1", **ours}


def as_list(values: Iterable[str]) -> str:
    """A list as a variable of the environment; a line each, since URLs may hold commas."""
    return "".join(f"{value}\n" for value in values)


def notify_address() -> tuple[str, int]:
    """Where systemd wants to hear from us, and within how many milliseconds (0: never)."""
    meant_for, usec = (os.environ.get(name, "") for name in _WATCHDOG)
    for_us = not meant_for or meant_for == str(os.getpid())
    watchdog_ms = int(usec) // 1000 if usec.isdigit() and for_us else 0
    return os.environ.get("NOTIFY_SOCKET", ""), watchdog_ms


def _read_file(environment: Mapping[str, str], folder: Path) -> tuple[Path, dict[str, Any]]:
    named = environment.get("TENURE_CONFIG")
    path = folder / Path(named or FILE_NAME).expanduser()
    if not path.exists():
        if named:
            raise UsageError(f"TENURE_CONFIG names {path}, which does not exist")
        return path, {}
    import tomllib

    try:
        table = _flatten(tomllib.loads(_read_trusted(path, chosen=bool(named))))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    for name in table:
        _check_name(path, name)
    return path, table


def _read_trusted(path: Path, *, chosen: bool) -> str:
    """The text of a regular file; raises if other users could have written it.

    Settings say where jobs and secrets are sent. `chosen`: its user named the file.
    """

    def at_once(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)  # the open of a FIFO waits for a writer

    with open(path, encoding="utf-8", opener=at_once) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(f"{path} is no regular file; settings and secrets are read from one")
        why = why_untrusted(found, chosen=chosen)
        if not chosen and not why:
            why = why_untrusted(path.lstat())  # a link of another user's to a file of ours
        if why:
            named = "" if chosen else " (one that TENURE_CONFIG names may be another user's)"
            raise UsageError(
                f"{path} {why}, who could send jobs and secrets elsewhere; it must be yours or "
                f"root's{named}, and not open to all: `chmod o-w {path}`"
            )
        if not chosen and found.st_mode & stat.S_IWGRP and found.st_gid != os.getegid():
            from tenure.core.printable import printable

            warning = f"warning: {path} can be written by group {found.st_gid}: `chmod g-w {path}`"
            sys.stderr.write(printable(warning) + "\n")
        return file.read()


def read_secret_file(path: str) -> str:
    """The text of a file that an option or a setting names."""
    return _read_trusted(Path(path).expanduser(), chosen=True).strip()


def _flatten(table: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{inner}": found for inner, found in value.items()}
        else:
            flat[key] = value
    return flat


def _check_name(path: Path, name: str) -> None:
    known = [*SETTINGS, *(f"{s.name}_file" for s in SETTINGS.values() if s.sensitive)]
    if name not in known:
        import difflib

        close = difflib.get_close_matches(name, known, n=1)
        hint = f", did you mean {close[0]!r}?" if close else "; `tenure config show` lists them"
        raise UsageError(f"{path}: there is no setting {name!r}{hint}")


def _parse(setting: Setting, raw: Any, where: str) -> Value:
    try:
        match setting.kind:
            case "text" if isinstance(raw, str):
                return raw
            case "integer" if not isinstance(raw, bool | float) and is_kept(int(raw)):
                return int(raw)
            case "number" if not isinstance(raw, bool) and is_kept(float(raw)):
                return float(raw)
            case "list":
                parts = raw.split("\n" if "\n" in raw else ",") if isinstance(raw, str) else raw
                return [str(part).strip() for part in parts if str(part).strip()]
    except (TypeError, ValueError):
        pass
    raise UsageError(
        f"{where}: {setting.name} is {repr(raw)[:80]}, which is not a valid {setting.kind}"
    )


def is_kept(number: float) -> bool:
    """Whether a number of the command line or a setting is one that stores and clocks hold.

    >>> [is_kept(number) for number in (0, -1.5, 2**53, float("inf"), float("nan"), 10**400)]
    [True, True, True, False, False, False]
    """
    return abs(number) <= 2**53


def _read_secret(setting: Setting, path: str, where: str) -> Value:
    """What the file says; a list has a line for each."""
    try:
        text = read_secret_file(path)
    except OSError as error:
        raise UsageError(f"{where}: the secret's file cannot be read: {error}") from None
    return _parse(setting, text.splitlines() if setting.kind == "list" else text, where)
