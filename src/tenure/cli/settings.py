"""Every setting there is: its name, kind, default, and what it does.

`worker.concurrency` is `TENURE_WORKER_CONCURRENCY` in the environment and `concurrency` of the
table `[worker]` in tenure.toml. What may hold a secret (keys, URLs) can also stand in a file:
`TENURE_LLM_KEY_FILE` names it, or systemd's LoadCredential= brings it as `TENURE_LLM_KEY`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["text", "integer", "number", "list"]
Value = str | int | float | list[str]

PREFIX = "TENURE_"

DATA_FOLDER = ".tenure"
"""Where `tenure up` keeps its data, and the other commands look, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting; `default` also tells an unset text ("") from a set one.

    `alias` is a variable that a contract's text names; ours wins over it.
    """

    name: str
    default: Value
    help: str
    kind: Kind = "text"
    secret: bool = False
    alias: str = ""

    @property
    def sensitive(self) -> bool:
        """Whether it may hold a secret, and so may be given as a file."""
        return self.secret or self.name.endswith(("url", "queues"))

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return PREFIX + self.name.replace(".", "_").upper()


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting(
            "queue_url", "streams+redis://127.0.0.1:6379/0", "the queue that commands speak to"
        ),
        Setting("gateway_url", "", "submit and watch through this gateway instead of the store"),
        Setting("api_key", "", "the key to show to that gateway", secret=True),
        Setting("data", DATA_FOLDER, "the folder in which `tenure up` keeps its data"),
        Setting("redis_url", "", "a Redis that `tenure up` uses instead of starting one"),
        Setting("postgres_url", "", "where `tenure up` keeps inbox and plane; else SQLite"),
        Setting("log_level", "info", "debug, info, warning or error"),
        Setting("log_format", "auto", "json, text, or auto: text on a terminal, json elsewhere"),
        Setting("gateway.host", "127.0.0.1", "the address the gateway listens on"),
        Setting("gateway.port", 8470, "the port the gateway listens on", "integer"),
        Setting("gateway.admin_address", "", "host:port for what admins and observers ask"),
        Setting("gateway.queues", [], "the queues a gateway serves; empty: queue_url", "list"),
        Setting("gateway.redact", [], "names masked besides the usual; -name, /pattern/", "list"),
        Setting("gateway.audit_keep", 10_000, "how many entries the audit log keeps", "integer"),
        Setting("gateway.trace_url", "", "where a trace is shown; {trace_id} stands for its id"),
        Setting("gateway.lake", "lake", "the folder of the pipeline's history, for its page"),
        Setting(
            "gateway.ttl_s",
            86_400,
            "how long a job is kept that does not say (also JOB_TTL_S)",
            "integer",
            alias="JOB_TTL_S",
        ),
        Setting("gateway.streams_per_key", 20, "event streams open at once with a key", "integer"),
        Setting("gateway.heartbeat_s", 15.0, "how often a silent event stream is kept", "number"),
        Setting("gateway.depth_per_key", 100_000, "unfinished jobs of a key in a queue", "integer"),
        Setting("gateway.rate_per_s", 1_000.0, "requests a second with a key; 0: any", "number"),
        Setting(
            "gateway.rate_burst", 2_000, "requests at once with a key; 0: rate_per_s", "integer"
        ),
        Setting("gateway.body_bytes_max", 204_800, "largest body of a request", "integer"),
        Setting("gateway.body_timeout_s", 30.0, "how long a body may take to arrive", "number"),
        Setting("gateway.form_bytes_max", 1_048_576, "largest form of the dashboard", "integer"),
        Setting("gateway.head_bytes_max", 32_768, "largest head of a request", "integer"),
        Setting("gateway.head_timeout_s", 10.0, "how long a head may take to arrive", "number"),
        Setting("gateway.idle_timeout_s", 20, "how long a connection may rest", "integer"),
        Setting("gateway.connections_max", 4_000, "connections open at once", "integer"),
        Setting("gateway.connections_per_address", 1_000, "of these by one address", "integer"),
        Setting("gateway.drain_timeout_s", 10.0, "how long requests may finish", "number"),
        Setting("gateway.session_s", 43_200.0, "how long a browser stays signed in", "number"),
        Setting("gateway.session_idle_s", 7_200.0, "and how long without a request", "number"),
        Setting(
            "gateway.failed_logins_per_min",
            30,
            "wrong keys from one address or for one key; more are a 429; 0: no limit",
            "integer",
        ),
        Setting(
            "gateway.trusted_proxies",
            [],
            "addresses or networks (`unix` for a socket) whose headers name client and person",
            "list",
        ),
        Setting(
            "gateway.sso_groups",
            [],
            "GROUP=SCOPE+SCOPE@TENANT: what people of a group may do; the first match decides",
            "list",
        ),
        Setting("gateway.sso_user_header", "X-Forwarded-User", "the header that names a person"),
        Setting("gateway.sso_groups_header", "X-Forwarded-Groups", "and the person's groups"),
        Setting("worker.queues", [], "the queues a worker serves (comma separated)", "list"),
        Setting("worker.concurrency", 0, "attempts at once in a worker; 0: its default", "integer"),
        Setting("worker.processes", 1, "worker processes", "integer"),
        Setting("worker.lease_ms", 0, "how long a lease lasts; 0: the contract's own", "integer"),
        Setting("worker.drain_timeout_s", 30.0, "how long running jobs may finish", "number"),
        Setting("worker.unknown_task_s", 3_600.0, "how long jobs without a handler wait", "number"),
        Setting("worker.metrics_port", 0, "serve Prometheus metrics there; 0: nowhere", "integer"),
        Setting("worker.otlp_url", "", "a collector for spans, such as http://127.0.0.1:4318"),
        Setting("llm.url", "", "an OpenAI-compatible server, such as http://127.0.0.1:8080/v1"),
        Setting("llm.model", "", "the model that server shall use; empty: its only one"),
        Setting("llm.key", "", "the key to show to that server", secret=True),
        Setting("llm.embed_model", "", "the model for /v1/embeddings; empty: llm.model"),
        Setting("llm.timeout_s", 120.0, "longest wait for the next piece of an answer", "number"),
        Setting("rag.folder", "", "text files that `rag` searches when a job brings none"),
        Setting("tools", "", "the TOML file that says what the task `tool` may do"),
        Setting("vault.keys", "", "the key ring: `id=base64` lines, active one first", secret=True),
        Setting("vault.kms", "", "a function that makes a key ring of your own (module:function)"),
        Setting("egress.allow", [], "private hosts and networks that jobs may name", "list"),
        Setting("webhooks.headers", "contract", "contract, or standard: those besides as well"),
        Setting(
            "webhooks.per_key", 0, "deliveries of a key at once in a worker; 0: all", "integer"
        ),
        Setting("webhooks.secrets", "", "lines `requester = secret`; * is for all", secret=True),
        Setting("transcode.folder", "", "where transcoding keeps its files; empty: below TMPDIR"),
        Setting("transcode.files", "", "the one folder that file:// may name; empty: none"),
        Setting("transcode.per_key", 0, "transcodes of a key at once in all; 0: any", "integer"),
        Setting("transcode.source_bytes_max", 20 * 1024**3, "largest source to fetch", "integer"),
        Setting("transcode.ffmpeg", "", "the ffmpeg to run; empty: the system's, else the wheel's"),
        Setting(
            "transcode.require",
            [],
            "parts of ffmpeg's cage without which no worker starts: network, files, syscalls",
            "list",
        ),
        Setting("transcode.readable", [], "further places that ffmpeg may read", "list"),
        Setting("transcode.output_bytes_max", 4 * 1024**3, "largest output", "integer"),
        Setting("transcode.memory_bytes_max", 4 * 1024**3, "memory of an ffmpeg", "integer"),
        Setting("transcode.cpu_s_max", 4 * 3600, "processor time of an ffmpeg", "integer"),
        Setting("transcode.wall_s_max", 4 * 3600.0, "how long an ffmpeg may run", "number"),
        Setting("transcode.threads_max", 1024, "threads and processes of an ffmpeg", "integer"),
    )
}
