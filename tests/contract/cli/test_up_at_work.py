"""What one running `tenure up` does. It is shared: no test here stops it or closes it to others.

tests/conftest.py gives this file to one process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tenure.samples import sample_flows
from tests.contract.cli.conftest import Program, wait_until
from tests.contract.cli.upped import Up
from tests.ports import free_port


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    up = Up(tmp_path_factory.mktemp("up"), free_port(), "--no-node")
    yield up
    up.program.kill()


def test_a_bullmq_queue_is_fed_by_us_and_worked_by_the_same_worker_without_node(up: Up) -> None:
    up.program.heard("(--no-node): the jobs of 'video-generation' come from our own producer")
    wait_until(lambda: [each["workers"] for each in up.queues()] == [1] * len(sample_flows()))
    assert [each["workers"] for each in up.call("queues")] == [1] * len(sample_flows())
    wait_until(lambda: up.worked("bullmq") >= 2)
    assert set(up.videos()) == {"sample-python"}
    assert not (up.folder / ".tenure" / "samples").exists()


def test_an_omniq_queue_with_groups_is_fed_and_worked_by_the_same_worker(up: Up) -> None:
    url = up.call("queues")[2]["url"]
    assert url.startswith("omniq+")
    wait_until(lambda: up.worked("omniq") >= 2)
    letters = up.call("ls", "--queue", url, "--state", "completed", "--limit", "500")
    assert len(letters) >= 2
    assert all(job["result"]["tenant"] == job["gid"] for job in letters)


def test_the_gateway_is_a_plane_whose_jobs_are_worked_over_http(up: Up) -> None:
    wait_until(lambda: up.worked("plane") >= 2, within_s=60)
    (plane,) = [each for each in up.call("queues") if each["url"].startswith("plane+")]
    assert plane["totals"]["SUCCEEDED"] >= 2


def test_a_transcode_succeeds_and_its_webhooks_arrive_verified(up: Up) -> None:
    ring = up.folder / ".tenure" / "vault.keys"
    assert ring.stat().st_mode & 0o777 == 0o600
    url = next(each["url"] for each in up.call("queues") if each["url"].startswith("inbox+"))
    wait_until(lambda: up.worked("inbox"), within_s=60)
    sample = up.call("ls", "--queue", url, "--state", "succeeded")[-1]["job_id"]
    wait_until(lambda: up.webhooks(sample)[-1:] == ["succeeded"])

    clip = (up.folder / ".tenure" / "transcode" / "clip.mp4").as_uri()
    asked = {
        "source": {"url": clip},
        "outputs": [{"name": "poster.jpg", "format": "jpg"}],
        "destination": {"url": clip.replace("clip.mp4", "mine")},
        "status_webhook_url": f"{up.receiver_url}/hooks",
    }
    status, job = up.ask("POST", "/transcode", asked)
    assert status == 202, job
    path = f"/transcode/status?job_id={job['job_id']}"
    wait_until(lambda: up.get(path)[1].get("status") == "succeeded", within_s=60)
    told = ["claimed", "fetching", "processing", "uploading", "succeeded"]
    wait_until(lambda: up.webhooks(job["job_id"]) == told)
    (made,) = up.get(path)[1]["outputs"]["outputs"]
    assert (up.folder / ".tenure" / "transcode" / made["key"]).stat().st_size == made["bytes"]


def test_a_second_up_in_the_same_folder_is_told_of_the_first(up: Up) -> None:
    second = Program(["up", "--port", str(up.port + 1)], up.folder, {})
    assert second.ended() == 4
    assert re.search(r"already runs here \(pid \d+, http://127", second.words)
    elsewhere = Program(["up", "--port", str(up.port), "--data", "other"], up.folder, {})
    assert elsewhere.ended() == 4
    assert f"tenure up --port {up.port + 1}" in elsewhere.words
