"""detect-secrets finds no secret in any file of the project."""

import subprocess
from pathlib import Path

import pytest
from detect_secrets.core.scan import _get_lines_from_file, scan_file
from detect_secrets.settings import default_settings, get_plugins

from tests.tidy.reading import ROOT

# What looks like a secret and is none, by its whole text, and why it is none. Tests and pages take
# their made-up passwords from here, so that a real one is not taken for one more of them.
WORDS = (
    "password secret SECRET pw canary-pw s3cret s3cr3t s@cret hush guess hunter2 hunter2x nonsense"
)
MADE_UP = dict.fromkeys(WORDS.split(), "a made-up password of documentation and tests")
NO_SECRETS = MADE_UP | {
    r"{port}\\": "a port in an address that is made to be misread, in a test of the guard",
    "canary-of-another-tenant": "what a caged program tries to read",
    "BEGIN PRIVATE KEY": "the head of a key that has no key, which redaction masks",
    "streams+redis://:***@127.0.0.1:21034/0`. While `tenure up": "a URL that is masked",
    "tenure": "the name of a Secret of Kubernetes, which is not in the files",
    "succeeded": "a state of jobs, given in the place of a password",
    "whsec_": "how every secret of a webhook begins",
    "0123456789ABCDEFGHJKMNPQRSTVWXYZ": "the alphabet of ULIDs",
    "e3b0c44298fc1c14": "the hash of nothing",
    "241763caab3e6a1a": "the hash of an example",
    "the journal holds no payload, key or credential": "a sentence",
    "dGVudXJlIG1lYXN1cmVzIGl0cyBvd24gd2ViaG9va3M=": "the key of a benchmark: it says so in base64",
}
PARTS = ("src", "tests/unit", "tests/contract", "tests", "docs", "")


def part_of(name: str) -> str:
    return next(part for part in PARTS if name.startswith(part))


def found_in(*names: str) -> list[str]:
    with default_settings():
        plain: set[tuple[str, str]] = set()
        return [
            f"{name}:{secret.line_number}: {secret.type}"
            for name in names
            if may_hold_secrets(ROOT / name, plain)
            for secret in scan_file(str(ROOT / name))
            if secret.secret_value not in NO_SECRETS
        ]


def may_hold_secrets(path: Path, plain: set[tuple[str, str]]) -> bool:
    """Whether any plugin finds anything before the filters, which only take away from it.

    The plugins are asked without what goes on around each call, and once for equal lines of one
    kind of file, which are kept in `plain`: that takes a quarter of the time.
    """
    plugins = get_plugins()
    for lines in _get_lines_from_file(str(path)):
        for line in {(path.suffix, each.rstrip()) for each in lines} - plain:
            if any(plugin.analyze_line(str(path), line[1], 1) for plugin in plugins):
                return True
            plain.add(line)
    return False


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part or "others")
def test_no_file_holds_a_secret(part: str) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    names = [name for name in listed.stdout.splitlines() if part_of(name) == part]
    assert names
    found = found_in(*(name for name in names if (ROOT / name).is_file()))
    assert not found, "name it in NO_SECRETS with the reason, if it is none"


def test_a_key_in_a_file_would_be_found(tmp_path: Path) -> None:
    (tmp_path / "settings.py").write_text(f'KEY = "AKIA{"QX7Z" * 4}"\n')
    assert found_in(str(tmp_path / "settings.py"))
