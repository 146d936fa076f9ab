"""Documents and deployment files agree with the code: commands, exit codes, settings, units."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from tenure.cli.config import SETTINGS, Config
from tenure.cli.console import COMMANDS, Exit, LazyGroup, group
from tenure.contracts.bullmq.options import Options as BullmqOptions
from tenure.contracts.omniq.options import Options as OmniqOptions
from tenure.contracts.streams.options import Options, keys
from tenure.core.registry import contract_names
from tenure.tasks.tools import load_tools
from tests.tidy.reading import files

ROOT = Path(__file__).parents[2]
UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
EXPOSURE_MAX = 2.0


def page(name: str) -> str:
    return (ROOT / name).read_text()


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the table under a heading."""
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_the_reference_lists_every_command_with_its_own_words() -> None:
    listed = {
        row[0].removeprefix("tenure "): row[1]
        for row in rows(page("docs/reference/cli.md"), "Commands")
    }
    assert listed == COMMANDS


def test_the_reference_lists_every_exit_code() -> None:
    listed = {int(row[0]): row[1] for row in rows(page("docs/reference/cli.md"), "Exit codes")}
    assert listed == {int(code): code.name.lower().replace("_", " ") for code in Exit}


def test_the_reference_lists_every_setting_with_variable_and_default() -> None:
    settings = rows(page("docs/reference/cli.md"), "Settings")
    listed = {row[0]: row[1:] for row in settings}
    assert len(listed) == len(settings)
    assert listed == {
        setting.name: [
            setting.variable,
            "" if setting.default in ("", []) else str(setting.default),
            setting.help,
        ]
        for setting in SETTINGS.values()
    }


def test_the_readme_says_of_each_contract_whether_it_is_there() -> None:
    listed = {row[0]: row[2] for row in rows(page("README.md"), "The five contracts")}
    there = {name for name, status in listed.items() if status.startswith("here")}
    assert there == set(contract_names()) - {"memory"}
    assert len(listed) == 5


def test_the_page_of_streams_lists_every_key() -> None:
    text = page("docs/contracts/streams.md")
    named = {name for row in rows(text, "Keys") for name in re.findall(r"jobs:\w+", row[0])}
    assert named == {*keys(""), "jobs:quarantine", "jobs:interrupt", "jobs:shards"}


@pytest.mark.parametrize(
    ("name", "heading", "options"),
    [
        ("streams", "Options of the URL", Options()),
        ("bullmq", "Options of the queue URL", BullmqOptions()),
        ("omniq", "Options of the queue URL", OmniqOptions(queue="letters")),
    ],
)
def test_the_page_of_a_contract_lists_every_option_with_its_default(
    name: str, heading: str, options: Options | BullmqOptions | OmniqOptions
) -> None:
    listed: dict[str, str] = {}
    for row in rows(page(f"docs/contracts/{name}.md"), heading):
        names, defaults = re.findall(r"\w+", row[0]), row[1].split(", ")
        listed |= dict(zip(names, defaults, strict=True))
    assert listed == {
        name: f"{getattr(options, name):g}"
        if name in ("journal_days", "unread_days")
        else str(getattr(options, name))
        for name in options.__struct_fields__
    }


def test_the_index_of_contracts_and_the_readme_lead_to_every_page() -> None:
    for name in set(contract_names()) - {"memory"}:
        assert f"({name}.md)" in page("docs/contracts/index.md")
        assert f"(docs/contracts/{name}.md)" in page("README.md")


def test_the_paths_in_the_architecture_exist() -> None:
    text = page("ARCHITECTURE.md")
    folders = [path.name for path in (ROOT / "src/tenure").iterdir() if path.is_dir()]
    paths = set(re.findall(rf"`((?:{'|'.join([*folders, 'lua'])})/[\w/.-]+)`", text))
    assert len(paths) > 40
    for path in paths:
        contracts = (ROOT / "src/tenure/contracts" / name for name in contract_names())
        places = [ROOT / "src/tenure" / path, *(folder / path for folder in contracts)]
        assert any(place.exists() for place in places), path


def test_the_example_files_are_ones_that_tenure_takes() -> None:
    assert {"disk", "uptime", "gateway"} == set(load_tools(ROOT / "examples" / "tools.toml"))
    config = Config({}, ROOT / "examples")
    assert (config.integer("worker.concurrency"), config.text("llm.url")) == (
        50,
        "http://127.0.0.1:8080/v1",
    )
    lines = page("deploy/systemd/tenure.env").splitlines()
    variables = {line.lstrip("#").split("=")[0] for line in lines if re.match(r"#?TENURE_", line)}
    assert variables <= {setting.variable for setting in SETTINGS.values()}
    credentials = re.findall(r"LoadCredential=(\w+):", page("deploy/systemd/credentials.conf"))
    assert set(credentials) <= {s.variable for s in SETTINGS.values() if s.sensitive}


def unit(path: Path) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[method-assign,assignment]
    parser.read(path)
    return parser["Service"]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_is_watched_restarted_drained_and_fenced_in(path: Path) -> None:
    service = unit(path)
    assert service["Type"] == "notify"
    assert (service["Restart"], service["KillSignal"]) == ("on-failure", "SIGTERM")
    assert int(service["WatchdogSec"]) >= 10
    assert (service["DynamicUser"], service["ProtectSystem"]) == ("yes", "strict")
    assert "StateDirectory" in service


def test_a_worker_has_time_to_drain_and_to_hand_back_before_it_is_killed() -> None:
    (path,) = (path for path in UNITS if "worker" in path.name)
    drain = re.search(r"TENURE_WORKER_DRAIN_TIMEOUT_S=(\d+)", path.read_text())
    assert drain is not None
    assert int(unit(path)["TimeoutStopSec"]) >= int(drain[1]) + 10


SYSTEMD_ANALYZE = shutil.which("systemd-analyze")
# Without systemd there is nothing to ask; the claims above hold everywhere.
if SYSTEMD_ANALYZE:

    @pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
    def test_systemd_understands_a_unit_and_finds_it_little_exposed(
        path: Path, tmp_path: Path
    ) -> None:
        program = Path(sys.executable).with_name("tenure")
        copy = tmp_path / path.name
        copy.write_text(path.read_text().replace("/opt/tenure/bin/tenure", str(program)))
        checked = run_analyze("verify", str(copy))
        assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
        judged = run_analyze("security", "--offline=true", "--no-pager", str(copy))
        exposure = re.search(r"exposure level for \S+: ([\d.]+)", judged.stdout)
        assert exposure is not None, judged.stdout + judged.stderr
        assert float(exposure[1]) <= EXPOSURE_MAX


def run_analyze(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(SYSTEMD_ANALYZE), *args], capture_output=True, text=True, timeout=60)


DOCUMENTS = [path.relative_to(ROOT).as_posix() for path in files(ROOT, "*.md")]
COMMAND = re.compile(r"(?:^\s*(?:\$ )?|\$\(|`)tenure ([a-z][^`\n|&>)]*)", re.MULTILINE)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_command_that_a_document_shows_has_the_options_it_shows(name: str) -> None:
    text = page(name).replace("\\\n", " ")
    wrong = [f"{name}: tenure {words}" for words in COMMAND.findall(text) if not is_one(words)]
    assert not wrong, "\n".join(wrong)


def is_one(words: str) -> bool:
    """Whether there is such a command with such options; what follows a comment is prose."""
    try:
        first, *rest = shlex.split(words, comments=True)
    except ValueError:  # a quotation that goes on in the next line
        return True
    command = LazyGroup().get_command(click.Context(group), first.strip(",.;:"))
    if isinstance(command, click.Group) and rest and rest[0] in command.commands:
        command, rest = command.commands[rest[0]], rest[1:]
    if command is None:
        return False
    known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
    options = {word.partition("=")[0] for word in rest if re.match(r"--[a-z]", word)}
    return options <= known | {"--help"}
