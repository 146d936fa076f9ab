"""curl, as people use it: the job's life in the terminal."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from tests.contract.gateway.conftest import Site

CURL = shutil.which("curl")


async def curl(*words: str) -> str:
    assert CURL, "curl is not installed"
    process = await asyncio.create_subprocess_exec(
        CURL, "-sS", *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 0, err.decode()
    return out.decode()


@pytest.mark.clause("S-40", "S-43", "S-46")
async def test_curl_submits_reads_and_follows_a_job_to_its_end(site: Site) -> None:
    web = await site.web()
    body = '{"task":"chat","payload":{"prompt":"Say hello."}}'
    media = "content-type: application/json"
    job = json.loads(await curl(f"{web.url}/v1/jobs", "-H", media, "-d", body))
    url = f"{web.url}/v1/jobs/{job['job_id']}"
    following = asyncio.create_task(curl("-N", f"{url}/events"))
    await site.finish(await site.claim())
    text = await following
    assert text.startswith("retry: 2000\nevent: hello\ndata: ")
    names = [line[7:] for line in text.split("\n") if line.startswith("event: ")]
    assert names == ["hello", "queued", "running", "done"]
    assert json.loads(await curl(url))["result"] == {"ok": True}
    last = [line[4:] for line in text.split("\n") if line.startswith("id: ")][-1]
    resumed = await curl("-w", "%{http_code}", "-H", f"Last-Event-ID: {last}", f"{url}/events")
    assert resumed == "204"


async def test_curl_gets_its_refusal_for_a_file_that_is_too_large(
    site: Site, tmp_path: Path
) -> None:
    """With Expect: 100-continue and without, chunked and not."""
    web = await site.web()
    big = tmp_path / "big.json"
    big.write_bytes(b'{"task":"chat","payload":{"a":"' + b"x" * 3_000_000 + b'"}}')
    common = ("-H", "content-type: application/json", "--data-binary", f"@{big}")
    for extra in ((), ("-H", "Expect:"), ("-H", "Transfer-Encoding: chunked")):
        said = await curl("-w", " %{http_code}", *common, *extra, f"{web.url}/v1/jobs")
        problem, _, status = said.rpartition(" ")
        assert (status, json.loads(problem)["code"]) == ("413", "too_large")


async def test_curl_speaks_to_a_gateway_on_a_unix_socket(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "g.sock"
    await site.gateway(unix_socket=str(path))
    said = await curl("--unix-socket", str(path), "http://localhost/readyz?verbose")
    assert said.endswith("ready\n")
