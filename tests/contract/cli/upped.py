"""A whole `tenure up` as a process, and ways to look at it."""

from __future__ import annotations

import http.client
import json
import re
import time
from pathlib import Path
from typing import Any

from tests.contract.cli.conftest import Program


class Up:
    """A running `tenure up` and the folder it lives in."""

    def __init__(self, folder: Path, port: int, *args: str, **environment: str) -> None:
        self.folder, self.port = folder, port
        self.program = self.start(*args, **environment)

    def start(self, *args: str, **environment: str) -> Program:
        begin = time.monotonic()
        self.program = Program(["up", "--port", str(self.port), *args], self.folder, environment)
        self.program.heard("tenure is up")
        self.seconds = time.monotonic() - begin
        return self.program

    def call(self, *args: str) -> list[Any]:
        """A reading command, run in the same folder: it finds the queue by itself."""
        reader = Program([*args, "--json"], self.folder, {})
        assert reader.ended() == 0, reader.words
        return [json.loads(line) for line in reader.out]

    def get(self, path: str) -> tuple[int, Any]:
        return self.ask("GET", path)

    def ask(self, method: str, path: str, body: Any = None, port: int = 0) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=10)
        sent = () if body is None else (json.dumps(body), {"Content-Type": "application/json"})
        try:
            connection.request(method, path, *sent)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except (OSError, http.client.HTTPException):
            return 0, {}
        finally:
            connection.close()

    def videos(self) -> list[str]:
        """Who added the finished jobs of the BullMQ queue, oldest first."""
        url = self.call("queues")[1]["url"]
        jobs = self.call("ls", "--queue", url, "--state", "completed", "--limit", "500")
        return [job["payload"]["userId"] for job in jobs if job["result"]["sample"]]

    @property
    def receiver_url(self) -> str:
        """Where it said that webhooks are shown."""
        return str(re.findall(r"see webhooks +(http://127\.0\.0\.1:\d+)/", self.program.words)[0])

    def webhooks(self, job_id: str) -> list[str]:
        """What verified webhooks said of a job, one after the other; no webhook was refused."""
        port = int(self.receiver_url.rpartition(":")[2])
        _, shown = self.ask("GET", "/deliveries", port=port)
        assert {each["verdict"] for each in shown} <= {"verified", "repeated"}
        verified = [each for each in shown if each["verdict"] == "verified"]
        return [each["status"] for each in reversed(verified) if each["job_id"] == job_id]

    def queues(self) -> list[Any]:
        """All queues, as the gateway sees them: to look often costs no program."""
        return list(self.get("/api/queues")[1].get("queues", ()))

    def worked(self, contract: str) -> int:
        """How many jobs of the contract's queue ended well."""
        rows = [row for row in self.queues() if row["contract"] == contract]
        return sum(row["states"]["done"] for row in rows)

    def tasks_done(self) -> set[str]:
        """The tasks of jobs that ended well, on any queue."""
        _, found = self.get("/api/jobs?q=is:done&limit=500")
        return {job["task"] for job in found.get("jobs", ())}


def children(pid: int, word: str) -> list[int]:
    """Of every thread: the store is started by one of its own."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    pids = [int(child) for file in files for child in file.read_text().split()]
    return [p for p in pids if word in Path(f"/proc/{p}/cmdline").read_bytes().decode()]
