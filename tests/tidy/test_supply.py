"""A build carries its bill of materials and its hashes; the audit of dependencies works."""

import json
import subprocess
import threading
import tomllib
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tests.tidy.reading import ROOT, SRC


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("build") / "new"
    done = subprocess.run([ROOT / "bin" / "build", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_built_file_is_in_the_list_of_hashes(built: Path) -> None:
    listed = dict(line.split()[::-1] for line in (built / "SHA256SUMS").read_text().splitlines())
    files = {path.name for path in built.iterdir()} - {"SHA256SUMS", ".gitignore"}
    assert listed.keys() == files
    assert sorted(Path(name).suffix for name in files) == [".gz", ".json", ".whl"]
    checked = subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=built)
    assert checked.returncode == 0


def test_the_bill_of_materials_is_valid_cyclonedx(built: Path) -> None:
    bill = (built / "sbom.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_5).validate_str(bill) is None


def test_the_bill_of_materials_names_what_users_get_and_no_tools(built: Path) -> None:
    bill = json.loads((built / "sbom.cdx.json").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    about = bill["metadata"]["component"]
    assert (about["name"], about["version"]) == (project["name"], project["version"])
    locked = {
        package["name"]: package["version"]
        for package in tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    }
    listed = {part["name"]: part["version"] for part in bill["components"]}
    assert {"click", "hiredis", "starlette", "cryptography", "imageio-ffmpeg"} <= listed.keys()
    assert not {"pytest", "ruff", "hatchling"} & listed.keys()
    assert all(locked.get(name, version) == version for name, version in listed.items())
    vendored = {part["name"] for part in bill["components"] if part["type"] == "file"}
    scripts = {path.name for path in SRC.rglob("static/*.*s")} - {"app.js", "app.css"}
    assert vendored == scripts


class Advisories(BaseHTTPRequestHandler):
    """The part of OSV's API that uv uses; `vulnerable` is the package it knows something about."""

    vulnerable = ""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        found = {"vulns": [{"id": "OSV-1", "modified": "2026-01-01T00:00:00Z"}]}
        asked = [query["package"]["name"] for query in body["queries"]]
        self._answer({"results": [found if name == self.vulnerable else {} for name in asked]})

    def do_GET(self) -> None:
        package = {"name": self.vulnerable, "ecosystem": "PyPI"}
        about = {"id": "OSV-1", "modified": "2026-01-01T00:00:00Z", "summary": "a hole"}
        self._answer(about | {"affected": [{"package": package}]})

    def _answer(self, document: object) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        """Nothing."""


@pytest.fixture
def database() -> Generator[tuple[str, type[Advisories]]]:
    kind = type("Known", (Advisories,), {})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", kind
        server.shutdown()


def audit(url: str) -> tuple[int, str]:
    done = subprocess.run(
        [ROOT / "bin" / "audit", "--service-url", url], capture_output=True, text=True
    )
    return done.returncode, done.stdout


def test_the_audit_names_a_vulnerable_package_and_tells_away_from_clean(
    database: tuple[str, type[Advisories]],
) -> None:
    """A database of our own on loopback: what the public one knows changes by the day."""
    url, known = database
    assert audit(url) == (0, "audit: no known vulnerability in uv.lock\n")
    known.vulnerable = "starlette"
    code, said = audit(url)
    assert code == 1
    assert "starlette" in said
    assert "OSV-1: a hole" in said
    code, said = audit("http://127.0.0.1:1")
    assert code == 3
    assert said.startswith("audit: COULD NOT AUDIT")
