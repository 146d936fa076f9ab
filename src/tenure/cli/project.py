"""The commands for a project: init, config, db, api, completion and version."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tenure import __version__
from tenure.cli.config import SETTINGS, Config, load_config
from tenure.cli.console import (
    Exit,
    Failed,
    answer,
    emit,
    emit_text,
    json_option,
    note,
    queue_option,
    safe_url,
    table,
)
from tenure.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tenure.core.registry import QueueUrl
    from tenure.sql.operations import Dialect
    from tenure.sql.schema import Migratable

T = TypeVar("T")


async def migrated(url: QueueUrl) -> list[str]:
    """Apply missing migrations; returns their names."""
    from tenure.sql.schema import migrate

    return await _with_migrations(url, migrate)


async def migration_script(url: QueueUrl) -> str:
    """What `migrated` would run, as SQL."""
    from tenure.sql.schema import migration_script

    return await _with_migrations(url, migration_script)


async def _with_migrations(url: QueueUrl, call: Callable[[Migratable, Dialect], Awaitable[T]]) -> T:
    if url.store.startswith("postgres"):
        from tenure.core.registry import open_part
        from tenure.sql.schema import PostgresMigrations

        engine = open_part(url.text, "database")
        try:
            return await call(PostgresMigrations(engine.database), "postgres")
        finally:
            await engine.close()
    from tenure.sql.schema import SqliteMigrations
    from tenure.store.sqlite import file_of

    return await call(SqliteMigrations(file_of(url.store)), "sqlite")


_FILES = {
    "handlers.py": "handlers.py.txt",
    "tenure.toml": "tenure.toml.txt",
    "systemd/tenure-gateway.service": "gateway.service.txt",
    "systemd/tenure-worker.service": "worker.service.txt",
}


@click.command("init")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=".")
def init_command(folder: Path) -> None:
    """Write a first handler, a settings file and units for systemd; nothing is overwritten.

    \b
    tenure init hello && cd hello
    """
    folder = folder.expanduser().absolute()
    there = [name for name in _FILES if (folder / name).exists()]
    if there:
        raise Failed(Exit.CONFLICT, f"{', '.join(there)} is there already; nothing was written")
    from importlib.resources import files  # slow to import

    program = shutil.which("tenure") or f"{sys.executable} -P -m tenure.cli"
    for name, source in _FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = (files("tenure.cli") / "skeleton" / source).read_text()
        path.write_text(
            text.format(folder=folder, program=program) if name.endswith(".service") else text
        )
    emit_text("\n".join(str(folder / name) for name in _FILES))
    where = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    emit_text(f"next: {where}tenure up handlers.py")


@click.group("config")
def config_command() -> None:
    """Show settings and where they come from.

    \b
    tenure config show --origin
    tenure config show queue_url
    """


@config_command.command("show")
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


@click.group("db")
def db_command() -> None:
    """Look after the database of a queue.

    \b
    tenure db migrate --queue inbox+postgresql://user@host/database
    """


@db_command.command("migrate")
@queue_option
@click.option("--sql", is_flag=True, help="Print what would be run, and change nothing.")
@json_option
def migrate(queue_url: str | None, sql: bool, as_json: bool) -> None:
    """Apply the migrations that the database lacks.

    Programs of the version before go on with the new schema, and can be started on it: migrate
    first, then replace them one by one. Two of these commands wait for each other.

    \b
    tenure db migrate --queue inbox+postgresql://user@host/database
    tenure db migrate --queue inbox+postgresql://user@host/database --sql | psql ...
    """
    import asyncio

    from tenure.core.registry import parse_url

    url = parse_url(load_config().text("queue_url", queue_url))
    if not url.store.startswith(("sqlite", "postgres", "libsql")):
        raise UsageError(f"{url.safe} has no database; name a queue that has one with --queue")
    if sql:
        script = asyncio.run(migration_script(url))
        answer(as_json, {"sql": script}, script or "-- up to date")
        return
    done = asyncio.run(migrated(url))
    if as_json:
        emit({"applied": done})
        return
    for name in done:
        emit_text(name)
    note(f"{len(done)} applied" if done else "up to date")


@click.command("api")
@click.argument("which", type=click.Choice(["openapi", "asyncapi", "rights"]))
def api_command(which: str) -> None:
    """Print the API of a gateway that serves all five contracts; no gateway has to run.

    \b
    tenure api openapi > openapi.json      # requests and responses, for client generators
    tenure api asyncapi > asyncapi.json    # event streams and webhooks
    tenure api rights > rights.md          # the scope that each route needs, and on whose objects

    A running gateway serves its own, with the contracts it has: /openapi.json, /asyncapi.json.
    """
    import msgspec

    text = described(which)
    emit_text((text if which == "rights" else msgspec.json.format(text, indent=1)).decode())


def described(which: str) -> bytes:
    """The document, generated from the endpoints without a connection to any store."""
    from tenure.core.registry import contracts

    try:
        from tenure.gateway.application import Gateway
        from tenure.gateway.http.routes import rights_page
        from tenure.gateway.settings import GatewaySettings
    except ModuleNotFoundError as error:
        raise UsageError(f"{error}; install the gateway: pip install 'tenure[gateway]'") from None
    queues = [each.example_url for each in contracts().values() if each.routes is not None]
    gateway = Gateway(GatewaySettings(queues=tuple(queues)))
    if which == "rights":
        return rights_page(gateway.rights).encode()
    return gateway.openapi if which == "openapi" else gateway.asyncapi


_VARIABLE = "_TENURE_COMPLETE"


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion_command(ctx: click.Context, shell: str) -> None:
    """Print a script that completes commands and options.

    \b
    eval "$(tenure completion bash)"                                  # in ~/.bashrc
    eval "$(tenure completion zsh)"                                   # in ~/.zshrc
    tenure completion fish > ~/.config/fish/completions/tenure.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"click has no completion for {shell}")
    emit_text(kind(ctx.find_root().command, {}, "tenure", _VARIABLE).source())


@click.command("version")
@json_option
def version_command(as_json: bool) -> None:
    """Print the version, and that of Python and the machine.

    \b
    tenure version --json
    """
    import platform

    facts = {
        "tenure": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    line = f"tenure {__version__} (Python {facts['python']}, {facts['system']})"
    answer(as_json, facts, line)
