"""`tenure config show`: every setting, its value, and where it comes from."""

from __future__ import annotations

from typing import Any

import click

from tenure.cli.config import Config, load_config
from tenure.cli.options import json_option
from tenure.cli.output import emit, emit_text, table
from tenure.cli.settings import SETTINGS
from tenure.cli.views import safe_url
from tenure.core.errors import UsageError


@click.group("config", short_help="Show settings and where they come from.")
def command() -> None:
    """Show settings and where they come from.

    \b
    tenure config show --origin
    tenure config show queue_url
    """


@command.command("show")
@click.argument("name", default="")
@click.option("--origin", is_flag=True, help="Also say where each value comes from.")
@click.option("--reveal", is_flag=True, help="With a NAME: do not mask secrets and passwords.")
@json_option
def show(name: str, origin: bool, reveal: bool, as_json: bool) -> None:
    """Show every setting, or the one of this NAME; secrets and passwords of URLs are masked.

    \b
    export REDIS_URL=$(tenure config show redis_url --reveal)
    """
    config = load_config()
    if name and name not in SETTINGS:
        raise UsageError(f"there is no setting {name!r}; `tenure config show` lists them")
    if reveal and not name:
        raise UsageError("--reveal needs the NAME of a setting")
    found = [_found(config, each, reveal) for each in ([name] if name else SETTINGS)]
    if as_json:
        for setting in found:
            emit(setting)
        return
    if name and not origin:
        emit_text(_shown(found[0]["value"]))
        return
    headers = ["SETTING", "VALUE", "ORIGIN" if origin else "MEANING"]
    last = "origin" if origin else "help"
    emit_text(table(headers, [[s["name"], _shown(s["value"]), s[last]] for s in found]))


def _found(config: Config, name: str, reveal: bool) -> dict[str, Any]:
    setting, found = SETTINGS[name], config.find(name)
    value = found.value
    if reveal:
        pass
    elif setting.secret and value:
        value = "***"
    elif name.endswith("url") and isinstance(value, str) and value:
        value = safe_url(value)
    elif name.endswith("queues") and isinstance(value, list):
        value = [safe_url(url) for url in value]
    return {
        "name": name,
        "value": value,
        "origin": found.origin,
        "variable": setting.variable,
        "help": setting.help,
    }


def _shown(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)
