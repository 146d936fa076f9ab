"""Drives a gateway by nothing but the generated client: `python driver.py URL`.

Runs in the generator's environment with the generated package on its path; mypy checks it against
that package.
"""

from __future__ import annotations

import sys

from tenure_client import AuthenticatedClient
from tenure_client.api.jobs import cancel_job, create_job, follow_job, read_job
from tenure_client.api.plane import create_plane_job, read_plane_job
from tenure_client.api.queues import list_queues
from tenure_client.api.transcode import create_transcode, read_transcode
from tenure_client.api.worker import worker_claim, worker_complete, worker_heartbeat
from tenure_client.models import (
    Accepted,
    ClaimRequest,
    ClaimResult,
    CompleteRequest,
    CreateJob,
    CreateJobPayload,
    CreateJobTask,
    CreatePlaneJobs,
    CreateTranscode,
    EmptyClaimResult,
    HeartbeatRequest,
    HeartbeatResult,
    JobView,
    Output,
    OutputFormat,
    Place,
    PlaneJobView,
    ProblemDocument,
    QueueList,
    SettleResult,
    TranscodeView,
)


def drive(client: AuthenticatedClient) -> None:
    queues = list_queues.sync(client=client)
    assert isinstance(queues, QueueList), queues
    assert {queue.contract for queue in queues.queues} == {
        *("streams", "bullmq", "omniq", "inbox", "plane")
    }
    stream_job(client)
    plane_job(client)
    transcode(client)


def stream_job(client: AuthenticatedClient) -> None:
    payload = CreateJobPayload.from_dict({"prompt": "hello"})
    body = CreateJob(task=CreateJobTask.CHAT, payload=payload)
    made = create_job.sync(client=client, body=body, idempotency_key="k1")
    assert isinstance(made, JobView), made
    seen = read_job.sync(made.job_id, client=client)
    assert isinstance(seen, JobView), seen
    assert (seen.job_id, seen.payload) == (made.job_id, {"prompt": "hello"})
    ended = cancel_job.sync(made.job_id, client=client)
    assert isinstance(ended, JobView), ended
    assert ended.status == "canceled"
    stream = follow_job.sync_detailed(made.job_id, client=client)
    assert stream.status_code == 200, stream
    frames = stream.content.decode()
    assert "event: hello" in frames
    assert "event: canceled" in frames
    missing = read_job.sync("nothing", client=client)
    assert isinstance(missing, ProblemDocument), missing
    assert missing.code == "not_found"


def plane_job(client: AuthenticatedClient) -> None:
    body = CreatePlaneJobs(task="resize", payload={"n": 1})
    made = create_plane_job.sync(client=client, body=body)
    assert isinstance(made, PlaneJobView), made
    claim = worker_claim.sync(client=client, body=ClaimRequest(worker_id="w1"))
    assert isinstance(claim, ClaimResult), claim
    assert (claim.job_id, claim.payload) == (made.job_id, {"n": 1})
    held = HeartbeatRequest(worker_id="w1", job_id=claim.job_id, lease_token=claim.lease_token)
    kept = worker_heartbeat.sync(client=client, body=held)
    assert isinstance(kept, HeartbeatResult), kept
    assert kept.ok
    result = CompleteRequest(
        worker_id="w1",
        job_id=claim.job_id,
        attempt_id=claim.attempt_id,
        lease_token=claim.lease_token,
        stream=claim.stream,
        result={"ok": True},
    )
    ended = worker_complete.sync(client=client, body=result)
    assert isinstance(ended, SettleResult), ended
    assert ended.ok
    done = read_plane_job.sync(claim.job_id, client=client)
    assert isinstance(done, PlaneJobView), done
    assert (done.status, done.result) == ("SUCCEEDED", {"ok": True})
    none = worker_claim.sync(client=client, body=ClaimRequest(worker_id="w1"))
    assert isinstance(none, EmptyClaimResult), none


def transcode(client: AuthenticatedClient) -> None:
    body = CreateTranscode(
        source=Place(url="s3://media/in/clip.mov"),
        outputs=[Output(name="720p.mp4", format_=OutputFormat.MP4, height=720)],
        destination=Place(url="s3://media/out"),
    )
    made = create_transcode.sync(client=client, body=body)
    assert isinstance(made, Accepted), made
    seen = read_transcode.sync(client=client, job_id=made.job_id)
    assert isinstance(seen, TranscodeView), seen
    assert seen.status == "queued"


if __name__ == "__main__":
    drive(AuthenticatedClient(base_url=sys.argv[1], token=sys.argv[2]))
