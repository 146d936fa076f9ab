"""A webhook receiver written from the contract's text alone, with the standard library.

It knows one secret and reads one signature. Each delivery is one line on standard output: what
became of it, the event's id and its status.
"""

import hashlib
import hmac
import json
import os
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

SECRET = os.environ["SECRET"].encode()
SKEW_S = NONCE_S = 300
nonces: dict[str, float] = {}
event_ids: set[str] = set()


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        verdict = self.judge(body)
        event = json.loads(body)
        said = {"verdict": verdict, "event_id": event["event_id"], "status": event["status"]}
        print(json.dumps(said), flush=True)
        self.send_response(200 if verdict in ("accepted", "duplicate") else 401)
        self.send_header("content-length", "0")
        self.end_headers()

    def judge(self, body: bytes) -> str:
        names = ("signature", "timestamp", "nonce", "event-id")
        given = {name: self.headers.get(f"x-euterpe-{name}", "") for name in names}
        if not all(given.values()):
            return "incomplete"
        if abs(time.time() - int(given["timestamp"])) > SKEW_S:
            return "skewed"
        text = f"{given['timestamp']}.{given['nonce']}.".encode() + body
        expected = hmac.new(SECRET, text, hashlib.sha256).hexdigest()
        if not hmac.compare_digest(expected, given["signature"]):
            return "forged"
        if nonces.get(given["nonce"], 0) > time.time():
            return "replayed"
        nonces[given["nonce"]] = time.time() + NONCE_S
        if given["event-id"] in event_ids:
            return "duplicate"
        event_ids.add(given["event-id"])
        return "accepted"

    def log_message(self, *args: object) -> None:
        """Only verdicts are written."""


server = HTTPServer(("127.0.0.1", 0), Receiver)
print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
