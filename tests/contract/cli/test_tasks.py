"""The built-in tasks in a real worker, on a real queue, with a model server on loopback."""

from __future__ import annotations

from tests.contract.cli.conftest import Cli, Start, wait_until
from tests.unit.tasks.model_server import model_server


def test_tokens_reach_a_follower_while_the_model_still_writes(cli: Cli, start: Start) -> None:
    tokens = [f"{n} " for n in range(10)]
    with model_server(tokens=tokens, pause_s=0.1) as script:
        start("worker", "tenure.tasks", TENURE_LLM_URL=script.url).heard("worker starts")
        said = cli("submit", "chat", "-d", '{"prompt": "count"}', "--follow", "--json")
    assert said.code == 0
    news = [event for event in said.lines if event["type"] == "token"]
    assert "".join(event["data"]["text"] for event in news) == "".join(tokens)
    assert len(news) >= 5
    assert said.lines[-1]["ts_ms"] - news[0]["ts_ms"] > 500
    result = said.lines[-1]["data"]["result"]
    assert (result["text"], result["usage"]) == ("".join(tokens), {"total_tokens": 10})


def test_a_model_that_is_busy_is_asked_again_when_it_says(cli: Cli, start: Start) -> None:
    with model_server(status=429, headers={"Retry-After": "1"}) as script:
        start("worker", "tenure.tasks", TENURE_LLM_URL=script.url, TENURE_LLM_MODEL="m")
        job_id = cli("submit", "chat", "-d", '{"prompt": "hi"}').out.strip()
        wait_until(lambda: script.asked)
        script.status = 200
        ended = cli("watch", job_id, "--timeout", "30", "--json")
    assert [e["type"] for e in ended.lines if e["type"] != "token"] == [
        "queued",
        "running",
        "retry",
        "running",
        "done",
    ]
    first, second = (e["ts_ms"] for e in ended.lines if e["type"] == "running")
    assert second - first >= 1000


def test_a_payload_that_does_not_fit_fails_at_once_with_what_would(cli: Cli, start: Start) -> None:
    with model_server() as script:
        start("worker", "tenure.tasks", TENURE_LLM_URL=script.url)
        said = cli("submit", "chat", "-d", '{"promt": "hi"}', "--wait", "--timeout", "30")
        shown = cli("ls", "--json").lines[0]
    assert said.code == 6
    assert "unknown field `promt` (fields: prompt, messages" in said.err
    assert (shown["state"], shown["own_state"], shown["attempt"]) == ("failed", "error", 1)
    assert script.asked == []


def test_a_worker_without_a_model_says_which_setting_is_missing(cli: Cli, start: Start) -> None:
    start("worker", "tenure.tasks")
    said = cli("submit", "plan", "-d", '{"goal": "x"}', "--wait", "--timeout", "30")
    assert said.code == 6
    assert "this worker cannot do 'plan': no model configured: set TENURE_LLM_URL" in said.err
