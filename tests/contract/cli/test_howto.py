"""The blocks of how-to pages and of the plane's page, run as they stand there."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import shlex
import subprocess
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tenure.core.job import NewJob
from tenure.core.registry import open_ledger, open_part, open_queue
from tenure.egress import Guard, Policy, RequestRefused
from tenure.egress.guard import read_target
from tenure.transcode.ffmpeg import locate_ffmpeg
from tenure.transcode.storage import read_request
from tenure.vault import Binding, KekRing, Secret, Vault, new_kek, read_ring
from tests.contract.cli.box import Box
from tests.contract.cli.conftest import Program, wait_until
from tests.contract.cli.pages import ROOT, console, matches, page, run_bash

SEND = """\
from tenure import task


@task("send")
async def send(job):
    return job.payload
"""
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def commands(name: str, language: str) -> list[str]:
    return [block.text for block in page(name).blocks if block.language == language]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    programs: list[Program] = []

    def start(words: list[str], **environment: str) -> Program:
        programs.append(Program(words, tmp_path, environment))
        return programs[-1]

    yield start
    for program in reversed(programs):
        program.kill()


def state_of(url: str, job_id: str) -> str:
    async def ask() -> str:
        ledger = open_ledger(url)
        try:
            job = await ledger.get(job_id)
            return job.state if job else "gone"
        finally:
            await ledger.close()

    return asyncio.run(ask())


# --- systemd -------------------------------------------------------------------------------------


@pytest.fixture
def box(tmp_path: Path, free_port: int) -> Iterator[Box]:
    box = Box(tmp_path / "box", ROOT, redis_port=free_port, gateway_port=free_port + 1)
    yield box
    box.stop()


@pytest.mark.runs("docs/howto/systemd.md:console")
def test_what_the_systemd_page_says_makes_a_box_that_serves(box: Box, free_port: int) -> None:
    told = []
    for block in commands("docs/howto/systemd.md", "console"):
        for command, _ in console(block):
            told.append(run_bash(box.here(command), ROOT, box.environment))
    (asked,) = box.installed()
    assert set(re.findall(r"\w+", asked.partition("[")[2])) <= set(EXTRAS)
    assert any("everysec" in each or "append" in each for each in told), "the doctor looked"
    with urllib.request.urlopen(f"http://127.0.0.1:{free_port + 1}/readyz", timeout=10) as answer:
        assert answer.status == 200
    with urllib.request.urlopen(f"http://127.0.0.1:{free_port + 1}/api/workers") as answer:
        workers = json.load(answer)["workers"]
    assert [worker["queue"] for worker in workers] == ["streams"]


# --- keys ----------------------------------------------------------------------------------------


@pytest.mark.runs("docs/howto/key-rotation.md:console")
def test_the_rotation_that_the_page_shows_moves_fifty_rows(tmp_path: Path) -> None:
    first, second = commands("docs/howto/key-rotation.md", "console")
    old, url = new_kek("kek-2025-01"), f"inbox+sqlite:///{tmp_path}/jobs.db"
    asyncio.run(seal(url, old, count=50))
    making = [command for command, _ in console(first)]
    (rotating, wanted) = console(second)[0]
    below = f"echo '{old}' >> ring"
    script = "\n".join(["set -euo pipefail", *making, below, f"{rotating} 2>&1"])
    said = run_bash(script, tmp_path, {"TENURE_QUEUE_URL": url})
    assert matches(said, wanted), said
    assert (tmp_path / "ring").stat().st_mode & 0o077 == 0


async def seal(url: str, kek: str, *, count: int) -> None:
    """Jobs with credentials sealed under a key."""
    queue, credentials = open_queue(url, worker_id="w1"), open_part(url, "credentials")
    vault = Vault(read_ring(kek))
    try:
        made = await queue.submit([NewJob(task="t", payload=b"{}") for _ in range(count)])
        for job in made:
            sealed = await vault.seal(Secret("{}"), Binding(job.job_id, "", 1))
            keys = (sealed.dek_wrapped, sealed.kek_id, sealed.encryption_version)
            columns = (sealed.encrypted, *keys)
            assert await credentials._columns.put(job.job_id, "", 0, columns)
    finally:
        await queue.close()
        await credentials.close()


@pytest.mark.runs("docs/howto/key-rotation.md:python")
def test_the_ring_of_a_kms_is_what_the_vault_asks_for() -> None:
    (block,) = commands("docs/howto/key-rotation.md", "python")
    scope: dict[str, Any] = {}
    exec(block, scope)
    shown = scope["Ring"]
    wanted = {name for name in vars(KekRing) if not name.startswith("_")}
    assert {name for name in vars(shown) if not name.startswith("_")} == wanted
    for name in ("wrap", "unwrap"):
        assert inspect.signature(getattr(shown, name), eval_str=True) == inspect.signature(
            getattr(KekRing, name), eval_str=True
        )


# --- transcoding, webhooks -----------------------------------------------------------------------


@pytest.mark.runs("docs/howto/transcoding.md:console", "docs/howto/transcoding.md:json")
def test_the_worker_of_the_transcoding_page_does_the_job_of_the_page(
    tmp_path: Path, started: Callable[..., Program]
) -> None:
    """With folders of this machine for the two buckets."""
    block = commands("docs/howto/transcoding.md", "console")[0]
    install, make, name, serve = [command for command, _ in console(block)]
    run_bash(make, tmp_path, {})
    variable, value = name.removeprefix("export ").split("=")
    ring = {variable: value.replace("$PWD", str(tmp_path))}
    assert re.findall(r"\[(\w+)\]", install)[0] in EXTRAS
    draw_clip(tmp_path / "uploads" / "clip.mov")
    (tmp_path / "media" / "films").mkdir(parents=True)
    job = commands("docs/howto/transcoding.md", "json")[0]
    read_request(json.loads(job))
    text = job.replace("s3://", f"file://{tmp_path}/")
    words = run_words(serve)
    worker = started(words, TENURE_TRANSCODE_FILES=str(tmp_path), **ring)
    url = f"inbox+sqlite:///{tmp_path}/jobs.db"
    worker.heard("worker starts")
    job_id = submit(url, NewJob(task="transcode", payload=text.encode()))
    wait_until(lambda: state_of(url, job_id) in ("succeeded", "dead_letter"))
    assert state_of(url, job_id) == "succeeded", worker.words
    made = {path.name for path in (tmp_path / "media" / "films").rglob("*") if path.is_file()}
    assert made == {output["name"] for output in json.loads(job)["outputs"]}


def draw_clip(path: Path) -> None:
    path.parent.mkdir()
    drawing = "-f lavfi -i testsrc=size=64x48:rate=5:duration=1 -f lavfi -i sine=duration=1"
    words = [str(locate_ffmpeg()), *drawing.split(), "-pix_fmt", "yuv420p", "-shortest", str(path)]
    subprocess.run(words, check=True, capture_output=True, timeout=60)


def run_words(command: str) -> list[str]:
    """The words of a `tenure` command."""
    program, *words = shlex.split(command.replace("\\\n", " "), comments=True)
    assert program == "tenure"
    return words


def submit(url: str, job: NewJob) -> str:
    async def put() -> str:
        queue = open_queue(url)
        try:
            return (await queue.submit([job]))[0].job_id
        finally:
            await queue.close()

    return asyncio.run(put())


@pytest.mark.runs("docs/howto/webhooks.md:console")
def test_the_addresses_that_the_webhooks_page_allows_are_allowed(tmp_path: Path) -> None:
    ((command, _),) = console(commands("docs/howto/webhooks.md", "console")[0])
    said = run_bash(f"{command}\ntenure config show --json", tmp_path, {})
    shown = {each["name"]: each["value"] for each in map(json.loads, said.splitlines())}
    guard = Guard(Policy(allow=tuple(shown["egress.allow"])))
    for url in ("http://hooks.internal:8080/a", "http://10.20.7.7:99/b"):
        guard.check_url(url)
    assert Policy(allow=tuple(shown["egress.allow"])).allows_name(
        read_target("http://a.svc.internal/")
    )
    with pytest.raises(RequestRefused):
        guard.check_url("http://10.21.0.1/")


# --- the plane -----------------------------------------------------------------------------------


@pytest.mark.runs("docs/contracts/plane.md:sh")
def test_the_three_commands_of_the_plane_are_a_plane_a_worker_and_a_job(
    tmp_path: Path, free_port: int, started: Callable[..., Program]
) -> None:
    (block,) = commands("docs/contracts/plane.md", "sh")
    text = block.replace("8470", str(free_port)).replace("\\\n", " ")
    serve, work, ask = [line for line in text.splitlines() if line.strip()]
    (tmp_path / "app.py").write_text(SEND)
    started([*run_words(serve), "--port", str(free_port)]).heard("gateway_ready")
    worker = started(run_words(work))
    worker.heard("worker starts")
    job_id = json.loads(run_bash(ask, tmp_path, {}))["job_id"]
    url = f"plane+sqlite:///{tmp_path}/plane.db?streams=mail:now,mail:later"
    wait_until(lambda: state_of(url, job_id) == "SUCCEEDED")


# --- scaling -------------------------------------------------------------------------------------


def test_the_trigger_for_keda_reads_a_number_of_a_gateway(
    started: Callable[..., Program], queue_url: str, free_port: int
) -> None:
    path = ROOT / "deploy" / "kubernetes" / "keda" / "scaledobject.yaml"
    *_, scaled = yaml.safe_load_all(path.read_text())
    (trigger,) = scaled["spec"]["triggers"]
    assert (trigger["type"], trigger["metadata"]["authMode"]) == ("metrics-api", "apiKey")
    words = ["gateway", "--queue", queue_url, "--port", str(free_port)]
    key = json.loads(
        run_bash(f"tenure keys create keda --scope metrics -q '{queue_url}' --json", ROOT, {})
    )["key"]
    started(words).heard("gateway_ready")
    asked = trigger["metadata"]
    url = asked["url"].replace("tenure-gateway:8470", f"127.0.0.1:{free_port}")
    request = urllib.request.Request(url, headers={asked["keyParamName"]: key})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert json.load(answer)[asked["valueLocation"]] == 0
