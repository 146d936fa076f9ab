"""What surrounds the inbox of `tenure up`: its key ring, its receiver, its permissions."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tenure.cli.config import Config
from tenure.cli.up import HOST, key_ring_file, port_above, set_up_inbox
from tenure.contracts.inbox.samples import draw_clip, sample
from tenure.core.errors import UsageError
from tenure.samples import REQUESTER, sample_flows, usable_flows
from tenure.transcode.ffmpeg import locate_ffmpeg
from tenure.vault import read_ring
from tenure.webhooks import new_secret
from tenure.webhooks.signing import read_secrets


def test_the_key_ring_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    path = key_ring_file(tmp_path)
    made = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_ring(made).active_id.startswith("kek-")
    assert key_ring_file(tmp_path).read_text() == made
    assert [each.name for each in tmp_path.iterdir()] == ["vault.keys"]


async def test_without_samples_nothing_but_a_key_ring_is_given(tmp_path: Path) -> None:
    around = await set_up_inbox(Config({}, tmp_path), tmp_path, gateway_port=8470, samples=False)
    assert list(around.environment) == ["TENURE_VAULT_KEYS_FILE"]
    assert (around.port, around.receiver_url) == (0, "")


async def test_one_port_and_one_folder_are_permitted_besides_what_was_set(tmp_path: Path) -> None:
    config = Config({"TENURE_EGRESS_ALLOW": "hooks.internal"}, tmp_path)
    around = await set_up_inbox(config, tmp_path, gateway_port=20_000, samples=True)
    given = around.environment
    assert given["TENURE_EGRESS_ALLOW"] == f"hooks.internal,127.0.0.1:{around.port}"
    assert given["TENURE_TRANSCODE_FILES"] == str(around.files) == str(tmp_path / "transcode")
    secrets = read_secrets(given["TENURE_WEBHOOKS_SECRETS"])
    assert await secrets.live(REQUESTER)
    assert await secrets.live("") == await secrets.live(REQUESTER)


async def test_what_the_operator_has_set_stays(tmp_path: Path) -> None:
    set_by_them = {
        "TENURE_VAULT_KEYS": "theirs=AAAA",
        "TENURE_WEBHOOKS_SECRETS": f"shop = {new_secret()}",
        "TENURE_TRANSCODE_FILES": str(tmp_path / "films"),
    }
    config = Config(set_by_them, tmp_path)
    around = await set_up_inbox(config, tmp_path, gateway_port=20_000, samples=True)
    given = around.environment
    assert not {"TENURE_VAULT_KEYS_FILE", "TENURE_TRANSCODE_FILES"} & given.keys()
    assert not (tmp_path / "vault.keys").exists()
    assert around.files == tmp_path / "films" / REQUESTER
    secrets = read_secrets(given["TENURE_WEBHOOKS_SECRETS"])
    theirs = read_secrets(set_by_them["TENURE_WEBHOOKS_SECRETS"])
    assert [one.reveal() for one in await secrets.live("shop")] == [
        one.reveal() for one in await theirs.live("shop")
    ]
    assert await secrets.live(REQUESTER)
    assert not await secrets.live("somebody")  # ours signs for the samples alone


async def test_their_secret_for_everybody_is_used_for_the_samples_too(tmp_path: Path) -> None:
    text = f"* = {new_secret()}"
    config = Config({"TENURE_WEBHOOKS_SECRETS": text}, tmp_path)
    around = await set_up_inbox(config, tmp_path, gateway_port=20_000, samples=True)
    assert around.environment["TENURE_WEBHOOKS_SECRETS"] == text


def test_a_taken_port_is_passed_over_and_the_range_has_an_end() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert port_above(port - 10) != port
    assert 0 < port_above(65_535) < 65_536


def test_a_flow_whose_modules_are_missing_is_left_out_with_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    assert usable_flows(said.append) == sample_flows()
    assert not said
    monkeypatch.setattr(
        "tenure.samples.find_spec", lambda name: None if name == "obstore" else name
    )
    left = [flow.contract for flow in usable_flows(said.append)]
    assert left == ["streams", "bullmq", "omniq", "plane"]
    assert said == ["without inbox: not installed are obstore (pip install 'tenure[transcode]')"]


def test_one_sample_in_ten_is_no_clip(tmp_path: Path) -> None:
    jobs = [sample(number, tmp_path, "http://127.0.0.1:9") for number in range(20)]
    assert sum(b"no-clip.txt" in job.payload for job in jobs) == 2
    assert {job.options["status_webhook_url"] for job in jobs} == {"http://127.0.0.1:9/hooks"}


def test_an_ffmpeg_that_fails_is_told_of_and_leaves_no_half_clip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "bin" / "ffmpeg"
    broken.parent.mkdir()
    broken.write_text(
        "#!/bin/sh\necho half > \"$(eval echo \\${$#})\"\necho 'no lavfi' >&2\nexit 3\n"
    )
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken.parent}:/usr/bin:/bin")
    with pytest.raises(UsageError, match=r"drew no clip \(3\): no lavfi"):
        draw_clip(locate_ffmpeg(), tmp_path / "files")
    assert [each.name for each in (tmp_path / "files").iterdir()] == ["no-clip.txt"]
