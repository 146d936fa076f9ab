"""Where a setting comes from, and what is said about one that is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tenure import Client
from tenure.cli.config import SETTINGS, Config, announce_up, withdraw_up
from tenure.core.config import RunningUp, running_up
from tenure.core.errors import UsageError
from tenure.core.registry import parse_url
from tenure.sync import Client as SyncClient

NOBODY = 65534


def config_in(folder: Path, toml: str = "", **environment: str) -> Config:
    if toml:
        (folder / "tenure.toml").write_text(toml)
    return Config(environment, folder)


def test_a_flag_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    name = "gateway.port"
    assert config_in(tmp_path).find(name).origin == "default"
    config = config_in(tmp_path, "[gateway]\nport = 1\n")
    assert (config.integer(name), config.find(name).origin) == (1, str(tmp_path / "tenure.toml"))
    config = config_in(tmp_path, TENURE_GATEWAY_PORT="2")
    assert (config.integer(name), config.find(name).origin) == (
        2,
        "environment TENURE_GATEWAY_PORT",
    )
    assert (config.integer(name, 3), config.find(name, 3).origin) == (3, "flag")


@pytest.mark.parametrize("name", list(SETTINGS))
def test_every_setting_can_be_turned_by_its_variable_and_by_the_file(
    tmp_path: Path, name: str
) -> None:
    setting = SETTINGS[name]
    text = {"list": "m://a,m://b", "text": "m://x"}.get(setting.kind, "42")
    by_variable = Config({setting.variable: text}, tmp_path)
    assert by_variable.find(name).value != setting.default
    table, _, key = name.rpartition(".")
    value = {"integer": "42", "number": "42.0", "list": '["m://a", "m://b"]', "text": '"m://x"'}[
        setting.kind
    ]
    toml = f"[{table}]\n{key} = {value}\n" if table else f"{key} = {value}\n"
    assert config_in(tmp_path, toml).find(name).value == by_variable.find(name).value


def test_the_variable_that_a_contract_names_gives_way_to_ours_and_wins_over_the_file(
    tmp_path: Path,
) -> None:
    toml, name = "[gateway]\nttl_s = 1\n", "gateway.ttl_s"
    assert config_in(tmp_path, toml, JOB_TTL_S="60").integer(name) == 60
    both = config_in(tmp_path, JOB_TTL_S="60", TENURE_GATEWAY_TTL_S="70")
    assert both.integer(name) == 70
    with pytest.raises(UsageError, match="JOB_TTL_S"):
        config_in(tmp_path, JOB_TTL_S="a day").integer(name)


def test_an_empty_variable_counts_as_not_set(tmp_path: Path) -> None:
    assert config_in(tmp_path, TENURE_LLM_URL="").find("llm.url").origin == "default"


def test_a_secret_may_be_given_as_a_file(tmp_path: Path) -> None:
    secret = tmp_path / "key"
    secret.write_text("s3cret\n")
    assert config_in(tmp_path, TENURE_LLM_KEY_FILE=str(secret)).text("llm.key") == "s3cret"
    by_file = config_in(tmp_path, f'[llm]\nkey_file = "{secret}"\n')
    assert by_file.text("llm.key") == "s3cret"
    with pytest.raises(UsageError, match="TENURE_API_KEY_FILE: the secret's file cannot be read"):
        config_in(tmp_path, TENURE_API_KEY_FILE=str(tmp_path / "none")).text("api_key")


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[gateway]\nprot = 1\n", "no setting 'gateway.prot', did you mean 'gateway.port'?"),
        ("[gateway]\nport = true\n", "gateway.port is True, which is not a valid integer"),
        ("[gateway]\nport = 1.5\n", "not a valid integer"),
        ("queue_url = 7\n", "not a valid text"),
        ("[worker]\ndrain_timeout_s = 'soon'\n", "not a valid number"),
        ("[gateway\n", "cannot be read"),
    ],
)
def test_a_fault_in_the_file_is_named_with_what_would_be_right(
    tmp_path: Path, toml: str, words: str
) -> None:
    with pytest.raises(UsageError) as raised:
        find_all(tmp_path, toml)
    assert words in str(raised.value)
    assert "tenure.toml" in str(raised.value)


def test_systemd_may_hand_a_secret_over_as_a_credential(tmp_path: Path) -> None:
    (tmp_path / "TENURE_QUEUE_URL").write_text("streams+redis://u:p@h:1/0\n")
    config = config_in(tmp_path, CREDENTIALS_DIRECTORY=str(tmp_path))
    assert config.text("queue_url") == "streams+redis://u:p@h:1/0"
    assert config.find("queue_url").origin == "credential TENURE_QUEUE_URL"
    assert config.find("llm.key").origin == "default"


def find_all(folder: Path, toml: str) -> None:
    config = config_in(folder, toml)
    for name in SETTINGS:
        config.find(name)


def test_a_named_file_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"TENURE_CONFIG names .* does not exist"):
        config_in(tmp_path, TENURE_CONFIG="other.toml")


def test_a_misspelt_variable_is_noticed_and_foreign_ones_are_not(tmp_path: Path) -> None:
    config = config_in(tmp_path, TENURE_QEUE_URL="x", TENURE_TEST_WORKERS="4", HOME="/")
    assert config.unknown_variables == ["TENURE_QEUE_URL"]


def up_of(pid: int) -> RunningUp:
    return RunningUp(
        pid=pid,
        gateway_url="http://127.0.0.1:1",
        queue_url="streams+redis://127.0.0.1:2/0",
        redis_url="redis://127.0.0.1:2/0",
        started_ms=time.time_ns() // 1_000_000,
    )


def test_a_running_up_in_this_folder_gives_the_queue(tmp_path: Path) -> None:
    folder = tmp_path / ".tenure"
    folder.mkdir()
    announce_up(folder, up_of(os.getpid()))
    config = config_in(tmp_path)
    assert config.text("queue_url") == "streams+redis://127.0.0.1:2/0"
    assert "tenure up" in config.find("queue_url").origin
    assert (folder / "up.json").stat().st_mode & 0o077 == 0
    assert config_in(tmp_path, TENURE_QUEUE_URL="memory://a").text("queue_url") == "memory://a"
    withdraw_up(folder)
    assert config_in(tmp_path).find("queue_url").origin == "default"


def test_an_up_that_died_without_a_word_is_not_believed(tmp_path: Path) -> None:
    announce_up(tmp_path, up_of(2**22 + 1))  # beyond the kernel's largest process id
    assert running_up(tmp_path) is None
    (tmp_path / "up.json").write_text("{half")
    assert running_up(tmp_path) is None


def test_what_another_user_says_of_a_running_up_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted in a shared folder, it would lead our jobs to a store of theirs."""
    announce_up(tmp_path, up_of(os.getpid()))
    assert running_up(tmp_path) is not None
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    assert running_up(tmp_path) is None


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the file another user's; an ordinary user, who may not, becomes another."""
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: NOBODY)


def test_a_settings_file_of_another_user_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tenure.toml"
    path.write_text('queue_url = "streams+redis://planted.example/0"\n')
    give_away(path, monkeypatch)
    with pytest.raises(UsageError, match=r"tenure\.toml belongs to user \d+.* root's"):
        config_in(tmp_path)
    named = config_in(tmp_path, TENURE_CONFIG=str(path))  # its user trusts the owner
    assert "planted" in named.text("queue_url")


def test_a_link_of_another_user_to_a_settings_file_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "tenure.toml"
    (tmp_path / "mine.toml").write_text("")
    link.symlink_to(tmp_path / "mine.toml")
    assert config_in(tmp_path).find("queue_url").origin == "default"
    give_away(link, monkeypatch)
    with pytest.raises(UsageError, match=r"belongs to user \d+"):
        config_in(tmp_path)


@pytest.mark.parametrize("named", [True, False])
def test_a_settings_file_that_all_users_can_write_is_not_believed(
    tmp_path: Path, named: bool
) -> None:
    path = tmp_path / "tenure.toml"
    path.write_text("")
    path.chmod(0o666)
    environment = {"TENURE_CONFIG": str(path)} if named else {}
    with pytest.raises(UsageError, match=r"written by all users \(mode 0666\).*chmod o-w"):
        config_in(tmp_path, **environment)
    secret = tmp_path / "key"
    secret.write_text("k")
    secret.chmod(0o602)
    path.chmod(0o600)
    config = config_in(tmp_path, TENURE_LLM_KEY_FILE=str(secret), **environment)
    with pytest.raises(UsageError, match=r"key can be written by all users"):
        config.text("llm.key")


def test_a_settings_file_that_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    """Opening a FIFO waits for a writer, without end."""
    fifo = tmp_path / "tenure.toml"
    os.mkfifo(fifo, 0o600)
    config = [sys.executable, "-m", "tenure.cli", "config", "show"]
    done = subprocess.run(config, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert f"{fifo} is no regular file" in done.stderr
    fifo.rename(tmp_path / "pipe")
    pipe = str(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is no regular file"):
        config_in(tmp_path, TENURE_CONFIG=pipe)
    with pytest.raises(UsageError, match="is no regular file"):
        config_in(tmp_path, TENURE_LLM_KEY_FILE=pipe).text("llm.key")
    gateway = [
        sys.executable,
        "-m",
        "tenure.cli",
        "gateway",
        "--queue",
        "memory://",
        "--worker-key-file",
    ]
    done = subprocess.run(
        [*gateway, pipe], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert f"{pipe} is no regular file" in done.stderr


def test_a_settings_file_that_a_foreign_group_can_write_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tenure.toml"
    path.write_text("")
    path.chmod(0o664)
    monkeypatch.setattr(os, "getegid", lambda: path.stat().st_gid)
    config_in(tmp_path)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(os, "getegid", lambda: NOBODY)
    config_in(tmp_path)
    assert f"warning: {path} can be written by group" in capsys.readouterr().err


ROOT = Path(__file__).parents[3]
MAIL = "bullmq+redis://127.0.0.1:6379/0?queue=mail"
NAMED = """
queue_url = "mail"

[queues.mail]
url = "memory://mail"

[queues.two-words]
url_file = "secret"

[worker]
queues = ["mail", "memory://other"]
"""


def test_a_queue_has_a_name_wherever_a_url_is_taken(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("memory://secret\n")
    config = config_in(tmp_path, NAMED.replace('"secret"', f'"{tmp_path}/secret"'))
    assert config.text("queue_url") == "memory://mail"
    assert config.text("queue_url", "two-words") == "memory://secret"
    assert config.texts("worker.queues") == ["memory://mail", "memory://other"]
    assert config.texts("gateway.queues", ("mail",)) == ["memory://mail"]
    assert config.queue_urls(("mail", "memory://a")) == ["memory://mail", "memory://a"]


@pytest.mark.runs("docs/reference/cli.md:toml")
def test_the_names_of_the_documentation_are_read(tmp_path: Path) -> None:
    shown = (ROOT / "docs/reference/cli.md").read_text().partition("```toml\n")[2]
    config = config_in(tmp_path, shown.partition("```")[0], TENURE_QUEUES_CLIPS_URL="memory://c")
    assert config.text("queue_url") == config.url_of("mail") == MAIL
    assert config.url_of("clips") == "memory://c"


def test_the_environment_wins_over_the_file_for_a_named_queue(tmp_path: Path) -> None:
    config = config_in(tmp_path, NAMED, TENURE_QUEUES_TWO_WORDS_URL="memory://env")
    assert config.url_of("two-words") == "memory://env"
    assert config.url_of("mail") == "memory://mail"


def test_an_unknown_name_is_answered_with_those_there_are(tmp_path: Path) -> None:
    config = config_in(tmp_path, NAMED)
    with pytest.raises(UsageError, match=r"'post' is not a queue URL.*there are: mail, two-words"):
        config.url_of("post")
    misnamed = config_in(tmp_path, NAMED, TENURE_QUEUE_URL="post")
    with pytest.raises(UsageError, match=r"queue_url \(environment TENURE_QUEUE_URL\): 'post'"):
        misnamed.text("queue_url")


@pytest.mark.parametrize(
    "toml", ["[queues.mail]\nulr = 'memory://a'\n", "[queues]\nmail = 'memory://a'\n"]
)
def test_a_queue_that_is_named_wrongly_is_refused(tmp_path: Path, toml: str) -> None:
    with pytest.raises(UsageError, match=r"write \[queues.NAME\] and url"):
        config_in(tmp_path, toml)


async def test_clients_take_names_and_the_configured_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TENURE_QUEUE_URL", raising=False)
    (tmp_path / "tenure.toml").write_text(NAMED)
    assert parse_url("mail").text == "memory://mail"
    async with Client("mail") as named, Client.from_env() as configured:
        handle = await named.submit("greet", {"name": "Ada"})
        assert (await configured.handle(handle.id).status()).state == "waiting"
    with SyncClient.from_env() as plain:
        assert plain.counts().waiting == 1
    monkeypatch.setenv("TENURE_QUEUE_URL", "memory://elsewhere")
    async with Client.from_env() as configured:
        assert (await configured.counts()).waiting == 0
