"""Passwords that are looked up at every connect: in a file, by a command, or by a function.

So they may rotate, and they stand neither in a URL nor in the process list.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tenure.core.errors import StoreUnreachable, UsageError

LOGIN_OPTIONS = frozenset({"password_file", "password_command", "credentials"})
"""The options of a store URL that say where the password is."""

_LOGIN_WITHIN_S = 10.0


def check_login(options: Mapping[str, str], kind: str) -> None:
    """Raise `UsageError` for two sources of a password, or a function that does not exist."""
    if len(LOGIN_OPTIONS & options.keys()) > 1:
        raise UsageError(f"a {kind} URL has one of password_file, password_command and credentials")
    if "credentials" in options:
        find_provider(options["credentials"])


def current_login(
    label: str, user: str, *, file: str = "", command: str = "", provider: str = ""
) -> tuple[str, str]:
    """The user and the password of now; may block, raises `StoreUnreachable` if there is none.

    `label` is the address of the store, without a password.
    """
    try:
        if provider:
            found = find_provider(provider)()
            return (user, found) if isinstance(found, str) else tuple(found)
        return user, Path(file).read_text().strip() if file else _output_of(command)
    except Exception as error:  # a provider of others may raise anything
        # Without the error's own text, which may have the command's arguments or the secret.
        source = provider or file or "the password_command"
        raise StoreUnreachable(
            f"{label}: no credentials from {source} ({type(error).__name__})"
        ) from None


def _output_of(command: str) -> str:
    import shlex  # few URLs have a command, and programs start faster without these
    import subprocess

    done = subprocess.run(  # nosec B603 # the operator's own command, without a shell
        shlex.split(command), check=True, capture_output=True, text=True, timeout=_LOGIN_WITHIN_S
    )
    return done.stdout.strip()


def find_provider(name: str) -> Any:
    """The function `package.module:function`, which returns a password, or a user and a password.

    It is called at every dial, in a thread of its own, so it may block.
    """
    import importlib

    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"credentials={name}: there is no such function ({error}); "
            "write package.module:function"
        ) from None
    if not callable(found):
        raise UsageError(f"credentials={name}: it is not a function")
    return found
