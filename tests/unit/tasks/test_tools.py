"""`tool`: what the allow-list permits, and nothing else."""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from tenure.core.errors import UsageError
from tenure.core.outcome import Fatal, Retry
from tenure.tasks.tools import Tool, load_tools, use_tool
from tests.processes import runs
from tests.unit.tasks.attempt import Attempt
from tests.unit.tasks.model_server import model_server
from tests.waiting import until


async def run(tool: Tool, **args: Any) -> dict[str, Any]:
    return await use_tool(Attempt({"tool": "t", "args": args}), {"t": tool})


def tools_file(folder: Path, text: str) -> Path:
    path = folder / "tools.toml"
    path.write_text(text)
    return path


async def test_a_command_runs_without_a_shell_and_its_argument_stays_one() -> None:
    tool = Tool(command=["printf", "%s|", "{what}"], args={"what": ".*"})
    result = await run(tool, what="a b; echo $HOME `id`")
    assert result["stdout"] == "a b; echo $HOME `id`|"
    assert result["exit_code"] == 0


async def test_a_command_sees_nothing_of_our_environment_or_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TENURE_LLM_KEY", "s3cret")
    env = await run(Tool(command=["env"], env={"LANG": "C"}))
    assert sorted(line.split("=")[0] for line in env["stdout"].split()) == ["LANG", "PATH"]
    where = await run(Tool(command=["pwd"]))
    assert where["stdout"].strip() != str(Path.cwd())
    assert not Path(where["stdout"].strip()).exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"what": "--delete"}, "does not match"),
        ({"what": "a\0b"}, "does not match"),
        ({"what": "x" * 300}, "does not match"),
        ({}, "takes these arguments: what"),
        ({"what": "a", "more": "b"}, "given were: more, what"),
    ],
)
async def test_arguments_that_the_list_does_not_permit_end_the_job(
    args: dict[str, str], words: str
) -> None:
    with pytest.raises(Fatal, match=words):
        await run(Tool(command=["echo", "{what}"], args={"what": ""}), **args)


async def test_a_tool_that_is_not_listed_is_refused_with_those_that_are() -> None:
    with pytest.raises(Fatal, match="no tool 'rm'; the tools file allows: t"):
        await use_tool(Attempt({"tool": "rm"}), {"t": Tool(command=["true"])})


async def test_too_much_output_is_cut_and_the_command_still_ends() -> None:
    tool = Tool(command=["head", "-c", "1000000", "/dev/zero"], output_bytes_max=1000)
    result = await run(tool)
    assert (len(result["stdout"]), result["truncated"]) == (1000, True)


async def test_a_command_that_takes_too_long_is_ended_with_all_it_started(tmp_path: Path) -> None:
    script = f"sleep 300 & echo $! > {tmp_path}/pid; wait"
    started = time.monotonic()
    with pytest.raises(Fatal, match=r"took longer than its 0\.5 s"):
        await run(Tool(command=["sh", "-c", script], timeout_s=0.5))
    assert time.monotonic() - started < 10
    child = int((tmp_path / "pid").read_text())
    await gone(child)


async def test_a_cancelled_attempt_ends_its_command(tmp_path: Path) -> None:
    script = f"echo $$ > {tmp_path}/pid; exec sleep 300"
    attempt = asyncio.create_task(run(Tool(command=["sh", "-c", script])))
    pid = tmp_path / "pid"
    await until(lambda: pid.exists() and pid.read_text(), "the command runs")
    attempt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attempt
    await gone(int(pid.read_text()))


async def gone(pid: int) -> None:
    await until(lambda: not runs(pid), f"process {pid} is gone")


async def test_a_failed_command_says_its_last_words() -> None:
    with pytest.raises(Fatal, match="ended with 3: broken"):
        await run(Tool(command=["sh", "-c", "echo broken >&2; exit 3"]))
    allowed = Tool(command=["sh", "-c", "exit 3"], ok_exit_codes=(0, 3))
    assert (await run(allowed))["exit_code"] == 3


async def test_a_missing_program_ends_the_job() -> None:
    with pytest.raises(Fatal, match="cannot be run: No such file"):
        await run(Tool(command=["no-such-program-here"]))


async def test_an_http_call_is_made_and_its_json_is_the_result() -> None:
    with model_server() as script:
        tool = Tool(url=script.url + "/v1/{what}?q={q}", args={"what": ".*", "q": ".*"})
        result = await run(tool, what="models?x=y", q="../y&z=1")
    assert (result["status"], result["body"]) == (200, {"data": [{"id": "listed-model"}]})
    assert script.asked[0][0] == "/v1/models%3Fx%3Dy?q=..%2Fy%26z%3D1"


@pytest.mark.parametrize(
    "what",
    ["..", ".", "", "../admin", "/admin", "a/b", "..\\admin", "%2e%2e", "..%2fadmin", "%252e%252e",
     "..;x=1", ";x", "a%2Fb", "a\nb", "%00"],
)  # fmt: skip
async def test_an_argument_cannot_change_the_path_of_a_url(what: str) -> None:
    with model_server() as script:
        tool = Tool(url=script.url + "/v1/{what}/list", args={"what": r"(?s).*"})
        with pytest.raises(Fatal, match="one segment of it"):
            await run(tool, what=what)
    assert script.asked == []


async def test_arguments_cannot_make_a_dot_segment_together() -> None:
    tool = Tool(url="http://127.0.0.1:9/v1/.{a}{b}/x", args={"a": ".*", "b": ".*"})
    with pytest.raises(Fatal, match="one segment of it"):
        await run(tool, a="", b=".")


@pytest.mark.parametrize(
    "what",
    ["/etc/passwd", "..", "../x", "a/../../x", "x=/etc/passwd", "@/etc/passwd", "~/x", "~root",
     "file:///etc/passwd", "file://localhost/etc/passwd", "a,/etc/passwd", "//etc/passwd",
     "{inside}/../secret", "{inside}/link/passwd", "\\\\host\\share",
     "-f/etc/passwd", "-vf/etc/passwd", "-ivf~root/x"],
)  # fmt: skip
@pytest.mark.parametrize("template", ["{what}", "--file={what}", "-f{what}"])
async def test_an_argument_cannot_lead_out_of_the_folders_of_its_tool(
    tmp_path: Path, what: str, template: str
) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link").symlink_to("/etc")
    ran = tmp_path / "ran"
    command = ["sh", "-c", f"touch {ran}", "sh", template]
    tool = Tool(command=command, args={"what": ".*"}, folders=[str(inside)])
    with pytest.raises(Fatal, match="a path that this tool may not use"):
        await run(tool, what=what.replace("{inside}", str(inside)))
    assert not ran.exists()


async def test_arguments_cannot_make_an_absolute_path_together() -> None:
    tool = Tool(command=["head", "-c1", "{a}/{b}"], args={"a": ".*", "b": ".*"})
    with pytest.raises(Fatal, match="a path that this tool may not use"):
        await run(tool, a="", b="etc/passwd")


async def test_an_argument_may_name_what_lies_in_the_folders_of_its_tool(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    tool = Tool(command=["cat", "{what}"], args={"what": ".*"}, folders=[str(tmp_path)])
    assert (await run(tool, what=f"{tmp_path}/a.txt"))["stdout"] == "hello"
    below = Tool(command=["cat", f"{tmp_path}/{{what}}"], args={"what": ".*"})
    assert (await run(below, what="a.txt"))["stdout"] == "hello"
    echo = Tool(command=["echo", "{what}"], args={"what": ".*"})
    for harmless in ("https://example.org/a/b", "user/repo", "1..5", "v1.2.3", "a b"):
        assert (await run(echo, what=harmless))["stdout"].strip() == harmless


async def test_a_link_in_the_folder_of_a_tool_does_not_lead_out_of_it(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc")
    tool = Tool(command=["cat", "{what}"], args={"what": ".*"}, cwd=str(tmp_path))
    with pytest.raises(Fatal, match="a path that this tool may not use"):
        await run(tool, what="link/passwd")
    below = Tool(
        command=["cat", f"{tmp_path}/{{what}}"], args={"what": ".*"}, folders=[str(tmp_path)]
    )
    with pytest.raises(Fatal, match="a path that this tool may not use"):
        await run(below, what="link/passwd")


async def test_errors_name_the_tool_and_nothing_of_the_operators() -> None:
    secrets = {"Authorization": "Bearer s3cret-token", "X-Key": "hunter2-hunter2"}
    with model_server(status=403) as script:
        script.says = f"no: {script.url}/v1?key=q-s3cret with s3cret-token and hunter2-hunter2"
        url = script.url.replace("http://", "http://user:passw0rd@") + "/v1?key=q-s3cret"
        called = Tool(url=url, method="POST", body={}, headers=secrets)
        with pytest.raises(Fatal, match="tool 't': its server answered 403") as refused:
            await run(called)
    with pytest.raises(Retry, match="tool 't': its server could not be reached") as away:
        await run(called)
    words = "echo $TOKEN >&2; exit 3"
    ran = Tool(command=["/bin/sh", "-c", words], env={"TOKEN": "env-s3cret"})
    with pytest.raises(Fatal, match="tool 't': it ended with 3") as ended:
        await run(ran)
    for raised in (refused, away, ended):
        for secret in (script.url[7:], "s3cret", "hunter2", "passw0rd", "/bin/sh"):
            assert secret not in str(raised.value)


async def test_an_http_call_fills_its_body_and_maps_its_errors() -> None:
    with model_server(status=503, headers={"Retry-After": "2"}) as script:
        tool = Tool(url=script.url, method="POST", body={"q": ["{q}"]}, args={"q": ".*"})
        with pytest.raises(Retry) as raised:
            await run(tool, q='"; drop')
    assert raised.value.after_ms == 2000
    assert script.asked[0][1] == {"q": ['"; drop']}


def test_the_file_is_read_as_its_documentation_says(tmp_path: Path) -> None:
    path = tools_file(
        tmp_path,
        '[tools.disk]\ncommand = ["df", "-h", "{path}"]\nargs.path = "/[a-z/]*"\ntimeout_s = 10\n'
        '[tools.weather]\nurl = "https://weather.example/v1/{city}"\nargs.city = "[a-z]+"\n',
    )
    assert sorted(load_tools(path)) == ["disk", "weather"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tools.x]\n", 'either "command" or "url"'),
        ('[tools.x]\ncommand = ["ls", "{path}"]\n', "uses {path}"),
        ('[tools.x]\ncommand = ["{program}"]\nargs.program = ".*"\n', "name its program itself"),
        ('[tools.x]\nurl = "http://{host}/"\nargs.host = ".*"\n', "fixed host"),
        ('[tools.x]\nurl = "file:///etc/passwd"\n', "http or https"),
        ('[tools.x]\ncommand = ["ls"]\nargs.a = "("\n', "pattern that is none"),
        ('[tools.x]\ncommand = ["ls", "{a.b}"]\nargs.a = ""\n', "not a plain name"),
        ('[tools.x]\ncommand = ["ls"]\nfolders = ["data"]\n', "absolute paths"),
        ('[tools.x]\ncomand = ["ls"]\n', "unknown field `comand`"),
        ("[tools", "is not right"),
    ],
)
def test_a_fault_in_the_file_is_named_before_any_job_runs(
    tmp_path: Path, text: str, words: str
) -> None:
    with pytest.raises(UsageError) as raised:
        load_tools(tools_file(tmp_path, text))
    assert words in str(raised.value)


async def test_a_server_that_echoes_its_request_shows_no_login_and_no_key_of_the_operator() -> None:
    login, key = b64encode(b"user:passw0rd").decode(), "hunter2-hunter2"
    echoed = f"Basic {login} {key} {b64encode(key.encode()).decode()} passw0rd metric"
    for status in (200, 403):
        with model_server(status=status) as script:
            script.says, script.tokens, script.streams = echoed, [echoed], False
            url = script.url.replace("http://", "http://user:passw0rd@") + "/v1?units=metric"
            tool = Tool(url=url, method="POST", body={}, headers={"X-Key": key})
            try:
                said = str(await run(tool))
                assert "metric" in said  # an ordinary word of the address
            except Fatal as refused:
                said = str(refused)
        assert "***" in said
        for secret in (login.rstrip("="), key, b64encode(key.encode()).decode(), "passw0rd"):
            assert secret not in said


async def test_the_output_of_a_command_shows_no_secret_of_its_environment() -> None:
    tool = Tool(command=["env"], env={"API_TOKEN": "env-s3cret", "REGION": "north-west"})
    said = (await run(tool))["stdout"]
    assert "API_TOKEN=***" in said
    assert "REGION=north-west" in said
    words = f"printf %s%s $API_TOKEN {'x' * 495} >&2; exit 3"  # the error ends within the secret
    failing = Tool(command=["/bin/sh", "-c", words], env={"API_TOKEN": "env-s3cret"})
    with pytest.raises(Fatal) as ended:
        await run(failing)
    assert "cret" not in str(ended.value)


@pytest.mark.parametrize(
    ("value", "words"),
    [("a\ud800", "is no Unicode text"), ("a" * 70_000, "cannot be called: a URL has")],
)
async def test_an_argument_that_no_url_can_hold_is_refused(value: str, words: str) -> None:
    with pytest.raises(Fatal, match=words):
        await run(Tool(url="http://127.0.0.1:9/{what}", args={"what": ".*"}), what=value)
