"""The commands there are, how light they start, and how errors end."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from tenure.cli import console
from tenure.cli.console import COMMANDS, Exit, Failed, LazyGroup, group, run
from tenure.core import errors

SHARED = ("config", "console")  # what every command needs
HEAVY = ("fastapi", "starlette", "uvicorn", "prometheus_client", "pydantic", "structlog")


@pytest.mark.parametrize("name", list(COMMANDS))
def test_the_help_line_in_the_table_is_the_command_s_own(name: str) -> None:
    command = LazyGroup().get_command(click.Context(group), name)
    assert command is not None
    assert (command.name, command.short_help) == (name, COMMANDS[name])


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Usage: tenure {name}")
    assert len(out.splitlines()) > 4


@pytest.mark.parametrize("name", list(COMMANDS))
def test_the_help_of_every_command_has_an_example_with_options_it_has(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run([name, "--help"])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    examples = [line for line in lines if re.search(rf"\btenure {name}\b", line)][1:]
    assert examples, f"tenure {name} --help shows no example"
    for example in examples:
        asked = example.partition("tenure ")[2].split(" | ")[0].partition(')"')[0]
        words = shlex.split(asked, comments=True)
        command = LazyGroup().get_command(click.Context(group), words[0])
        rest = words[1:]
        if isinstance(command, click.Group):
            command, rest = command.commands[rest[0]], rest[1:]
        assert command is not None
        known = {option for param in command.params for option in param.opts}
        assert {word for word in rest if re.match(r"--?[a-z]", word)} <= known, example


# They start what runs until it is stopped, or print what is a document by itself.
WORDLESS = {"up", "gateway", "worker", "receiver", "api", "completion", "init"}
WORDLESS |= {"keys new-kek", "pipeline report", "audit export"}


def test_every_command_that_answers_speaks_json() -> None:
    lacking = set()
    for name in COMMANDS:
        found = LazyGroup().get_command(click.Context(group), name)
        assert found is not None
        parts = {name: found}
        if isinstance(found, click.Group):
            parts = {f"{name} {part}": each for part, each in found.commands.items()}
        for words, command in parts.items():
            if "--json" not in {option for param in command.params for option in param.opts}:
                lacking.add(words)
    assert lacking == WORDLESS


def test_help_and_an_unknown_command_import_no_command() -> None:
    code = (
        "import sys; from tenure.cli.console import run; run(['--help']); run(['sumbit']);"
        "print(sorted(m for m in sys.modules if m.startswith('tenure.cli.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == str([f"tenure.cli.{name}" for name in SHARED])
    assert "there is no command 'sumbit', did you mean 'submit'?" in done.stderr


@pytest.mark.parametrize("name", ["submit", "watch", "ls", "inspect", "queues", "cancel"])
def test_a_light_command_never_loads_the_web_server_or_the_worker(name: str) -> None:
    code = (
        "import sys, tenure.cli.console as g, tenure.contracts.streams;"
        f"g.run([{name!r}, '--help']);"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# Each of them takes longer to import than the command has work to do.
SLOW: tuple[str, ...] = (
    "importlib.resources",
    "tempfile",
    "zipfile",
    "difflib",
    "http.client",
    "structlog",
    "rich",
)
SLOW += ("ctypes", "zoneinfo", "multiprocessing", "importlib.metadata", "opentelemetry")
MODULES_MAX = 120  # beside the standard library, whose number changes with the Python
SQL = ("inbox", "plane")


@pytest.mark.parametrize("contract", ["streams", "bullmq", "omniq", *SQL])
@pytest.mark.parametrize("command", ["queues", "ls"])
def test_a_command_that_only_looks_imports_little_and_reads_no_script(
    contract: str, command: str, tmp_path: Path
) -> None:
    """What a start costs, counted: a clock would measure the machine's other work too."""
    name = "" if contract == "streams" else "?queue=a"
    url = f"{contract}+redis://127.0.0.1:1/0{name}"
    if contract in SQL:
        url = f"{contract}+sqlite:///{tmp_path}/jobs.db"
        run(["db", "migrate", "--queue", url])
    words = [command, "--queue", url]
    code = (
        "import sys; read = []\n"
        "sys.addaudithook(lambda e, a: read.append(str(a[0])) if e == 'open' else None)\n"
        "from tenure.cli.console import run\n"
        f"code = run({words!r})\n"
        f"slow = sorted(set({SLOW!r}) & set(sys.modules))\n"
        "standard = sys.stdlib_module_names\n"
        "ours = [name for name in sys.modules if name.split('.')[0] not in standard]\n"
        "print(code, len(ours), slow, [name for name in read if name.endswith('.lua')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    exit_code, modules, *rest = done.stdout.splitlines()[-1].split(" ", 2)
    expected = Exit.OK if contract in SQL else Exit.UNREACHABLE
    assert int(exit_code) == expected, done.stderr
    assert rest == ["[] []"]
    assert int(modules) <= MODULES_MAX, modules


@pytest.mark.parametrize("contract", ["streams", "bullmq", "omniq", "inbox", "plane"])
def test_a_contract_is_opened_without_what_writes_logs_or_serves(contract: str) -> None:
    code = (
        f"import sys, tenure.contracts.{contract};"
        f"print(sorted(set({(*HEAVY, 'rich')!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_light_command_starts_within_150_ms(tmp_path: Path) -> None:
    """As installed, in CPU time of its own; what the interpreter itself needs is not ours."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(tmp_path)
    for command in ("version", "--help", "--version"):
        best = min(_seconds(command, environment) for _ in range(6))
        bare = min(_seconds("", environment) for _ in range(6))
        assert best - bare < 0.15, command


def _seconds(command: str, environment: dict[str, str]) -> float:
    argv = [sys.executable, *(["-m", "tenure.cli", command] if command else ["-c", ""])]
    begin = _cpu_of_children()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, env=environment)
    return _cpu_of_children() - begin


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidJob("x"), 2),
        (errors.NotFound("x"), 3),
        (errors.Conflict("x"), 4),
        (errors.StoreUnreachable("x"), 5),
        (errors.ReplyLost("x"), 5),
        (Failed(Exit.JOB_FAILED, "x"), 6),
        (Failed(Exit.TIMEOUT, "x"), 7),
        (errors.ServerError("x"), 1),
        (ValueError("x"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_each_error_has_its_exit_code(error: BaseException, code: int) -> None:
    assert console.exit_code_of(error) == code


def test_an_error_is_one_line_and_with_json_one_object(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENURE_QUEUE_URL", "strems+redis://127.0.0.1:1/0")
    assert run(["ls"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("tenure: queue URL strems+redis")
    assert "did you mean 'streams'?" in said.err
    assert len(said.err.splitlines()) == 1
    assert run(["ls", "--json"]) == 2
    problem = json.loads(capsys.readouterr().err)
    assert (problem["code"], problem["exit_code"]) == ("unknown_contract", 2)
    assert "streams" in problem["detail"]


def test_a_wrong_option_is_a_usage_error_that_names_the_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["ls", "--limt", "3"]) == 2
    assert "see `tenure ls --help`" in capsys.readouterr().err
    assert run(["submit"]) == 2
    assert run([]) == 2


def test_a_reader_that_goes_away_is_no_error() -> None:
    argv = f"{sys.executable} -m tenure.cli config show --json | head -n 1"
    done = subprocess.run(argv, shell=True, capture_output=True, text=True)
    assert json.loads(done.stdout)["name"] == "queue_url"
    assert done.stderr == ""
