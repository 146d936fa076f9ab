"""Blocks of the documentation: each is well formed, and each is run by a test that says so.

A test that runs blocks has the mark `runs("page.md:language")`; tests/tidy sees that none lacks it.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
import tomllib
from pathlib import Path

import pytest
import yaml

from tenure.cli.config import Config
from tenure.core.job import NewJob
from tenure.core.redaction import USUAL
from tenure.core.registry import open_ledger, open_queue
from tenure.webhooks.signing import new_nonce, new_secret, read_secret, signed_headers
from tests.contract.cli.conftest import Cli, wait_until
from tests.contract.cli.pages import ROOT, Block, page

DOCUMENTS = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))]
SHELL = ("bash", "sh", "console")
KNOWN = {*SHELL, "python", "javascript", "json", "toml", "yaml", "sql", "text", "mermaid", "nginx"}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_block_of_a_page_is_well_formed(name: str) -> None:
    document = page(name)
    fences = re.findall(r"^```", document.text, re.MULTILINE)
    assert len(fences) == 2 * len(document.blocks), "a block without a language"
    for block in document.blocks:
        assert block.language in KNOWN, block
        well_formed(block)


def well_formed(block: Block) -> None:
    """Raises where it is not."""
    if block.language == "python":
        compile(block.text, "block", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    elif block.language == "json":
        json.loads(block.text)
    elif block.language == "toml":
        tomllib.loads(block.text)
    elif block.language == "yaml":
        yaml.safe_load(block.text)
    elif block.language in SHELL:
        commands = re.sub(r"^\$ ", "", block.text, flags=re.MULTILINE)
        done = subprocess.run(["bash", "-n"], input=commands, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def blocks_of(name: str, language: str) -> list[str]:
    return [block.text for block in page(name).blocks if block.language == language]


@pytest.mark.runs("docs/howto/dashboard.md:toml", "docs/howto/dashboard.md:bash")
def test_the_settings_of_the_dashboard_page_are_ones_that_there_are(
    cli: Cli, tmp_path: Path
) -> None:
    (block,) = blocks_of("docs/howto/dashboard.md", "toml")
    (tmp_path / "tenure.toml").write_text(block)
    config = Config({}, tmp_path)
    assert config.texts("gateway.redact") == ["iban", "birth"]
    assert "{trace_id}" in config.text("gateway.trace_url")
    (command,) = blocks_of("docs/howto/dashboard.md", "bash")
    said = cli(*shlex.split(command)[1:])
    assert said.code == 0, said.err


@pytest.mark.runs("docs/operating/audit.md:bash")
def test_the_commands_of_the_audit_page_verify_and_export(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = blocks_of("docs/operating/audit.md", "bash")
    for line in block.splitlines():
        said = cli(*shlex.split(line)[1:])
        assert said.code == 0, said.err
    assert (tmp_path / "audit.jsonl").exists()


def test_the_audit_page_names_every_word_that_masks() -> None:
    text = (ROOT / "docs/operating/audit.md").read_text()
    assert [word for word in USUAL if f"`{word}`" not in text] == []


@pytest.mark.runs("docs/howto/webhooks.md:python")
async def test_the_receiver_of_the_webhooks_page_takes_a_delivery_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = blocks_of("docs/howto/webhooks.md", "python")
    secret, effects = new_secret(), []

    async def do_once(event_id: str, event: object) -> None:
        effects.append((event_id, event))

    scope = {"SECRET": secret, "do_once": do_once}
    exec(block, scope)
    event = {"event_id": "job.1", "job_id": "job", "seq": 1, "status": "claimed"}
    body = json.dumps(event).encode()
    headers = dict(
        signed_headers(
            [read_secret(secret)],
            event_id="job.1",
            body=body,
            now_s=int(time.time()),
            nonce=new_nonce(),
        )
    )
    assert await scope["receive"](body, headers) == 204  # type: ignore[operator]
    assert await scope["receive"](body, headers) == 401  # type: ignore[operator]
    assert await scope["receive"](body + b" ", headers) == 401  # type: ignore[operator]
    assert effects == [("job.1", event)]


@pytest.mark.runs("docs/contracts/omniq.md:python")
class TestOmniq:
    """The four programs of the page of the contract, on a server of their own."""

    def programs(self, redis_url: str) -> list[str]:
        found = blocks_of("docs/contracts/omniq.md", "python")
        return [text.replace("redis://localhost:6379/0", redis_url) for text in found]

    def put_in(self, redis_url: str) -> str:
        async def put() -> str:
            queue = open_queue(f"omniq+{redis_url}?queue=letters")
            try:
                (made,) = await queue.submit([NewJob(task="letters", payload=b'{"to":"bo"}')])
                return made.job_id
            finally:
                await queue.close()

        return asyncio.run(put())

    def state(self, redis_url: str, job_id: str) -> str:
        async def ask() -> str:
            ledger = open_ledger(f"omniq+{redis_url}?queue=letters")
            try:
                job = await ledger.get(job_id)
                return job.state if job else "gone"
            finally:
                await ledger.close()

        return asyncio.run(ask())

    def works(self, program: str, redis_url: str) -> None:
        """It runs a job, and ends on a signal."""
        job_id = self.put_in(redis_url)
        worker = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE)
        try:
            wait_until(lambda: self.state(redis_url, job_id) == "completed")
        finally:
            worker.send_signal(signal.SIGTERM)
        _, errors = worker.communicate(timeout=30)
        assert worker.returncode == 0, errors.decode()

    def test_the_client_publishes_reserves_and_acknowledges(self, redis_url: str) -> None:
        text = textwrap.indent(self.programs(redis_url)[0], "    ")
        program = f"import asyncio\nasync def main():\n{text}\nasyncio.run(main())"
        words = [sys.executable, "-c", program]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")

    def test_the_blocking_client_publishes_and_looks(self, redis_url: str) -> None:
        words = [sys.executable, "-c", self.programs(redis_url)[1]]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert int(done.stdout) >= 1

    def test_the_helper_consumes_until_it_is_told_to_stop(self, redis_url: str) -> None:
        text = textwrap.indent(self.programs(redis_url)[2], "        ")
        head = "import asyncio\nfrom tenure.contracts.omniq import Client\nasync def main():\n"
        opened = f"    async with Client({redis_url!r}) as client:\n"
        self.works(f"{head}{opened}{text}\nasyncio.run(main())", redis_url)

    def test_the_worker_takes_a_job_that_names_no_task(self, redis_url: str) -> None:
        self.works(self.programs(redis_url)[3], redis_url)
