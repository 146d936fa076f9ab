"""The commands, in a copy of the project whose uv and Python are stand-ins without network."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from textwrap import dedent

import pytest

from tests.tidy.reading import ROOT

# What the commands may use of a bare Debian, Python aside.
TOOLS = (
    "bash cat dirname env flock grep head id mkdir mv readlink rm sed sha256sum sh sort stat tail"
)
TOOLS += " uname"

UV = """\
    #!/bin/sh
    case $1 in
      --version) echo "uv 9.9.9" ;;
      sync)
        echo "$*" >>"{log}"
        mkdir -p "$UV_PROJECT_ENVIRONMENT/bin"
        for name in python tenure; do
          cp "{stubs}/venv-$name" "$UV_PROJECT_ENVIRONMENT/bin/$name"
        done
        ;;
      audit) exit "${{AUDIT_ENDS-0}}" ;;
      *) exit 1 ;;
    esac
"""

# New enough, and without venv and pip.
PYTHON = """\
    #!/bin/sh
    case $1 in
      -c) echo "$0" ;;
      -V) echo Python 3.11.0 ;;
      *) exit 1 ;;
    esac
"""

TESTS = "def test_that_stands_company(): pass"


class Copy:
    """A copy of the project's commands with one suite of tests, and a PATH of its own."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a path with spaces"
        self.path = folder / "path"
        self.log = folder / "uv.log"
        self._copy_project()
        self.path.mkdir()
        for tool in [*TOOLS.split(), "cp"]:
            (self.path / tool).symlink_to(shutil.which(tool) or tool)
        self.program(folder / "venv-python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        self.program(folder / "venv-tenure", '#!/bin/sh\necho "$PWD" "$@"\n')
        self.program(self.path / "python3", dedent(PYTHON))
        self.program(self.path / "uv", dedent(UV).format(log=self.log, stubs=folder))

    def _copy_project(self) -> None:
        (self.root / "tests" / "unit").mkdir(parents=True)
        for name in ("bin", ".ci"):
            shutil.copytree(ROOT / name, self.root / name)
        for name in ("pyproject.toml", "uv.lock", "tests/conftest.py"):
            shutil.copy(ROOT / name, self.root / name)
        (self.root / "tests" / "unit" / "test_one.py").write_text(TESTS)

    def program(self, path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def suite(self, name: str, text: str) -> None:
        folder = self.root / "tests" / name
        folder.mkdir(exist_ok=True)
        (folder / "test_more.py").write_text(dedent(text))

    def run(
        self, command: str | Path, *words: str, cwd: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        clean = {
            "PATH": str(self.path),
            "TENURE_TEST_WORKERS": "0",
            # Slow to import.
            "PYTEST_ADDOPTS": "-p no:schemathesis -p no:hypothesispytest -p no:valkey -p no:anyio",
        }
        if cache := sys.pycache_prefix:  # what this run has compiled need not be compiled again
            clean["PYTHONPYCACHEPREFIX"] = cache
        return subprocess.run(
            [self.root / command, *words],
            cwd=cwd or self.root,
            env=clean | environment,
            capture_output=True,
            text=True,
            timeout=100,
        )

    def syncs(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


def test_help_needs_no_environment_and_names_the_usage(copy: Copy) -> None:
    done = copy.run("bin/test", "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("bin/test [suite ...]")
    assert copy.syncs() == []


# Fails the first time only, as a test that is too tight for a busy machine may.
CROWDED = """\
    from pathlib import Path

    def test_that_passes_the_second_time():
        seen = Path(__file__).with_suffix(".seen")
        first = not seen.exists()
        seen.touch()
        assert not first, "the first failure"
"""


@pytest.mark.parametrize("suite", ["unit", "chaos"])
def test_a_failed_test_is_not_run_again(copy: Copy, suite: str) -> None:
    copy.suite(suite, CROWDED)
    done = copy.run("bin/test")
    assert done.returncode == 1
    assert "1 passed, 1 failed" in done.stdout


def test_an_unknown_suite_is_an_error_that_lists_the_known_ones(copy: Copy) -> None:
    copy.suite("chaos", "def test_that_kills(): pass\n\ndef test_that_stops(): pass")
    (copy.root / "tests" / "browser").mkdir()
    done = copy.run("bin/test", "unti")
    assert done.returncode == 2
    assert "no suite 'unti'; the suites are: chaos, unit" in done.stderr


def test_the_environment_is_made_once_and_again_when_the_lock_changes(copy: Copy) -> None:
    assert copy.run("bin/up").returncode == 0
    assert copy.run("bin/up").returncode == 0
    assert len(copy.syncs()) == 1
    assert copy.syncs()[0].startswith("sync --quiet --frozen --extra all")
    with (copy.root / "uv.lock").open("a") as lock:
        lock.write("# changed\n")
    assert copy.run("bin/up").returncode == 0
    assert len(copy.syncs()) == 2


def test_spark_comes_with_the_tests_and_stays(copy: Copy) -> None:
    """It is heavy: who only starts the system is spared it, and who has it does not lose it."""
    assert copy.run("bin/up").returncode == 0
    assert "--extra spark" not in copy.syncs()[-1]
    copy.run("bin/test", "unit")
    assert copy.syncs()[-1].startswith("sync --quiet --frozen --extra all --extra spark")
    assert copy.run("bin/up").returncode == 0
    assert len(copy.syncs()) == 2
    with (copy.root / "uv.lock").open("a") as lock:
        lock.write("# changed\n")
    assert copy.run("bin/up").returncode == 0
    assert "--extra spark" in copy.syncs()[-1]


def test_spark_comes_with_up_where_it_is_asked_for(copy: Copy) -> None:
    assert copy.run("bin/up", "--with-spark").returncode == 0
    assert "--extra spark" in copy.syncs()[-1]
    assert copy.run("bin/up").returncode == 0
    assert len(copy.syncs()) == 1, "once is enough"


def test_an_environment_that_was_moved_here_is_made_anew(copy: Copy) -> None:
    copy.run("bin/up")
    moved = copy.root.with_name("elsewhere")
    copy.root.rename(moved)
    copy.root = moved
    (moved / ".venv" / "of-the-old-place").touch()
    assert copy.run("bin/up").returncode == 0
    assert not (moved / ".venv" / "of-the-old-place").exists()


def test_without_a_new_enough_node_a_wheel_brings_one(copy: Copy) -> None:
    copy.run("bin/up")
    copy.program(copy.path / "node", "#!/bin/sh\necho v12.22.9\n")
    copy.run("bin/up")
    copy.program(copy.path / "node", "#!/bin/sh\necho v22.1.0\n")
    copy.run("bin/up")
    assert ["--group node" in sync for sync in copy.syncs()] == [True, False]


# An apt-get that brings what it is asked for, and an id of somebody who may ask.
APT = """\
    #!/bin/sh
    echo "$*" >>"{log}"
    [ "$1" = install ] && printf '#!/bin/sh\\necho Chromium 1.0\\n' >"{path}/chromium"
    [ "$1" = install ] && chmod +x "{path}/chromium"
    [ "$1" = download ] && echo >"$2_1.0_all.deb"
    true
"""


@pytest.fixture
def apt(copy: Copy) -> Path:
    log = copy.path.parent / "apt.log"
    (copy.path / "chmod").symlink_to(shutil.which("chmod") or "chmod")
    copy.program(copy.path / "apt-get", dedent(APT).format(log=log, path=copy.path))
    (copy.path / "id").unlink()
    copy.program(copy.path / "id", "#!/bin/sh\necho 0\n")
    copy.program(copy.path / "curl", "#!/bin/sh\n")
    copy.program(copy.path / "ldconfig", "#!/bin/sh\necho libatomic.so.1\n")
    copy.suite("interop", "def test_in_a_browser(): pass")
    return log


@pytest.mark.parametrize("words", [(), ("interop",), ("unit", "tests/interop/test_more.py")])
def test_the_suites_that_need_a_browser_bring_one_once(
    copy: Copy, apt: Path, words: tuple[str, ...]
) -> None:
    for _ in range(2):
        assert copy.run("bin/test", *words).returncode == 0
    assert apt.read_text().splitlines() == [
        "update",
        "install -y --no-install-recommends chromium",
    ]


def test_a_machine_without_curl_is_given_one(copy: Copy, apt: Path) -> None:
    (copy.path / "curl").unlink()
    done = copy.run("bin/test", "interop")
    assert apt.read_text().splitlines()[1].endswith("chromium curl")
    assert "apt did not bring curl" in done.stderr


def test_no_other_suite_and_not_up_asks_for_a_browser(copy: Copy, apt: Path) -> None:
    assert copy.run("bin/test", "unit", "-k", "company").returncode == 0
    assert copy.run("bin/up").returncode == 0
    assert not apt.exists()


def test_a_browser_that_cannot_be_got_is_told_of_and_the_tests_still_run(
    copy: Copy, apt: Path
) -> None:
    copy.program(copy.path / "apt-get", "#!/bin/sh\necho 'E: no network' >&2\nexit 100\n")
    done = copy.run("bin/test", "interop")
    assert (
        "apt did not bring chromium: E: no network. As root: apt-get install chromium"
        in done.stderr
    )
    assert done.stdout.splitlines()[-1].startswith("==== 1 passed, 0 failed in ")


def test_who_is_not_root_asks_sudo_without_being_asked_for_a_password(
    copy: Copy, apt: Path
) -> None:
    copy.program(copy.path / "id", "#!/bin/sh\necho 1000\n")
    copy.program(copy.path / "sudo", f'#!/bin/sh\necho "sudo $*" >>"{apt}"\nexit 1\n')
    done = copy.run("bin/test", "interop")
    assert apt.read_text() == "sudo -n DEBIAN_FRONTEND=noninteractive apt-get update\n"
    assert "tests that use chromium will fail" in done.stderr


def test_the_suite_that_needs_promtool_nginx_and_pgbouncer_takes_them_out_of_their_packages_once(
    copy: Copy, apt: Path
) -> None:
    unpack = """\
        #!/bin/sh
        mkdir -p usr/bin usr/sbin && echo >usr/bin/promtool
        echo >usr/sbin/nginx && echo >usr/sbin/pgbouncer
        chmod +x usr/*/*
    """
    copy.program(copy.path / "dpkg-deb", dedent(unpack))
    copy.program(copy.path / "ldd", "#!/bin/sh\n")  # no library is missing
    copy.suite("contract", "def test_of_metrics(): pass")
    for _ in range(2):
        assert copy.run("bin/test", "contract").returncode == 0
    assert apt.read_text() == "download promtool\ndownload nginx\ndownload pgbouncer\n"
    for name in ("promtool", "nginx", "pgbouncer"):
        assert (copy.root / ".tools" / name).is_file()


def test_up_hands_its_arguments_on_and_stays_where_it_was_called(
    copy: Copy, tmp_path: Path
) -> None:
    link = tmp_path / "link to up"
    link.symlink_to(copy.root / "bin" / "up")
    done = copy.run(link, "--port", "9", "--data", "here", cwd=tmp_path)
    assert done.stdout == f"{tmp_path} up --port 9 --data here\n"
    assert "set-up: ready" in done.stderr


def test_without_a_new_enough_python_it_is_said_what_to_do(copy: Copy) -> None:
    copy.program(copy.path / "python3", "#!/bin/sh\nexit 1\n")
    done = copy.run("bin/test")
    assert done.returncode == 1
    assert "no Python 3.11 or newer found" in done.stderr
    assert copy.syncs() == []


class Offered:
    """A folder of wheels with a uv in it is pip's only source; `python3` is a real one."""

    def __init__(self, copy: Copy) -> None:
        self.copy = copy
        self.folder = copy.path.parent / "wheels"
        self.folder.mkdir()
        (copy.path / "python3").unlink()
        (copy.path / "python3").symlink_to(os.path.realpath(sys.executable))
        self.version = re.findall(r"^uv==(\S+) ", (ROOT / "bin/uv.txt").read_text(), re.MULTILINE)[
            0
        ]
        self.program = (copy.path / "uv").read_text().replace("9.9.9", self.version)
        (copy.path / "uv").unlink()

    def wheel(self) -> str:
        """Makes it; its hash."""
        about = f"uv-{self.version}"
        wheel = self.folder / f"{about}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as files:
            script = zipfile.ZipInfo(f"{about}.data/scripts/uv")
            script.external_attr = 0o100755 << 16
            files.writestr(script, self.program)
            head = "Metadata-Version: 2.1\nName: uv\nVersion: "
            files.writestr(f"{about}.dist-info/METADATA", f"{head}{self.version}\n")
            kind = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            files.writestr(f"{about}.dist-info/WHEEL", kind)
            files.writestr(f"{about}.dist-info/RECORD", "")
        return hashlib.sha256(wheel.read_bytes()).hexdigest()

    def up(self) -> subprocess.CompletedProcess[str]:
        return self.copy.run("bin/up", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(self.folder))


def test_a_uv_that_is_not_the_pinned_one_is_not_installed(copy: Copy) -> None:
    offered = Offered(copy)
    offered.wheel()
    done = offered.up()
    assert done.returncode == 1
    assert "not the one that bin/uv.txt names by its hash" in done.stderr
    assert not list((copy.root / ".tools").glob("bin/uv*"))
    assert copy.syncs() == []


def test_the_pinned_uv_is_installed_and_replaced_when_the_pin_changes(copy: Copy) -> None:
    offered = Offered(copy)
    pins = copy.root / "bin" / "uv.txt"
    for version in (offered.version, "99.0.0"):
        offered.program = offered.program.replace(offered.version, version)
        offered.version = version
        pins.write_text(f"uv=={version} --hash=sha256:{offered.wheel()}\n")
        done = offered.up()
        assert done.returncode == 0, done.stderr
        uv = copy.root / ".tools" / "bin" / "uv"
        assert version in subprocess.run([uv, "--version"], capture_output=True, text=True).stdout
    assert len(copy.syncs()) == 2


def test_the_pins_of_uv_are_for_both_architectures_and_hashes_of_sha256() -> None:
    """The wheels are named in the package index; here only that none was lost."""
    hashes = re.findall(r"--hash=sha256:([0-9a-f]{64})\b", (ROOT / "bin/uv.txt").read_text())
    assert len(set(hashes)) == len(hashes) == 6


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ("0", 0, "audit: no known vulnerability in uv.lock"),
        ("1", 1, "audit: FAILED: uv.lock holds packages with known vulnerabilities"),
        ("2", 0, "audit: COULD NOT AUDIT: the advisory database did not answer"),
    ],
    ids=["nothing known", "vulnerable", "database away"],
)
def test_continuous_integration_fails_on_known_vulnerabilities_and_says_when_it_could_not_look(
    copy: Copy, ends: str, code: int, said: str
) -> None:
    done = copy.run(".ci/run", "unit", AUDIT_ENDS=ends)
    assert done.returncode == code
    assert done.stdout.splitlines()[-1].startswith(said)


def test_a_failed_test_fails_the_run_whatever_the_audit_says(copy: Copy) -> None:
    copy.suite("contract", "def test_that_fails(): assert 0")
    for ends in "012":
        assert copy.run(".ci/run", "contract", AUDIT_ENDS=ends).returncode == 1


def test_the_fuzzers_run_for_as_long_and_from_the_seed_as_asked(copy: Copy) -> None:
    said = "import os\ndef test_it(): print(os.environ['TENURE_FUZZ_S'], 'seconds')\n"
    copy.suite("fuzz", said)
    done = copy.run("bin/fuzz", "--minutes", "3", "--seed", "5", "-s")
    assert done.returncode == 0
    assert "bin/fuzz: 3 minutes each, --seed 5" in done.stdout
    assert "180 seconds" in done.stdout
    assert "==== 1 passed, 0 failed" in done.stdout


def test_an_old_uv_is_not_used(copy: Copy) -> None:
    copy.program(copy.path / "uv", "#!/bin/sh\necho uv 0.4.9\n")
    done = copy.run("bin/up")
    assert done.returncode == 1
    assert "uv could not be installed" in done.stderr


def test_a_home_that_cannot_be_written_moves_the_cache_here(copy: Copy, tmp_path: Path) -> None:
    not_a_folder = tmp_path / "file"
    not_a_folder.touch()
    told = copy.path / "uv"
    told.write_text(told.read_text().replace('echo "$*"', 'echo "$UV_CACHE_DIR"'))
    copy.run("bin/up", HOME=str(not_a_folder))
    assert copy.syncs() == [str(copy.root / ".tools" / "cache")]


# bin/suites.py looks for this mark, which is not for this file.
MEASURING = """\
    import pytest

    @pytest.mark.ALONE
    def test_that_measures(): pass
""".replace("ALONE", "alone")


def test_tests_that_stand_no_company_run_in_a_phase_of_their_own(copy: Copy) -> None:
    copy.suite("unit", MEASURING)
    copy.suite("chaos", "def test_that_kills(): pass\n\ndef test_that_stops(): pass")
    done = copy.run(".ci/run")
    assert done.returncode == 0, done.stdout + done.stderr
    together, few, alone = done.stdout.split("test session starts")[1:]
    assert "1 passed in" in together
    assert "2 passed in" in few
    assert "1 passed in" in alone
    assert "==== 4 passed, 0 failed in " in done.stdout


# Notes each time it is imported, and whether that was only to compile it.
NOTING = """\
    import sys

    with open("imported", "a") as file:
        file.write(f"{'--collect-only' in sys.argv} ")

    def test_it(): pass
"""


def test_bytecode_is_made_once_before_many_begin_and_kept_in_the_environment(copy: Copy) -> None:
    """Even where the machine says that none is wanted."""
    copy.suite("unit", NOTING)
    for _ in range(2):
        done = copy.run(
            *("bin/test", "unit", "-k", "test_it"),
            PYTHONPYCACHEPREFIX="",
            PYTHONDONTWRITEBYTECODE="1",
            TENURE_TEST_WORKERS="2",
        )
        assert done.returncode == 0, done.stdout + done.stderr
    kept = copy.root / ".venv" / "bytecode"
    assert list(kept.rglob("test_one.*.pyc"))
    assert not list((copy.root / "tests").rglob("*.pyc"))
    imported = (copy.root / "imported").read_text().split()
    assert imported[0] == "True"
    assert imported.count("True") == 1


def test_npm_brings_the_packages_of_a_suite_while_its_tests_begin(copy: Copy) -> None:
    copy.suite("interop", "def test_one(): pass")
    peer = copy.root / "tests" / "interop" / "peer"
    peer.mkdir()
    (peer / "package-lock.json").write_text("{}")
    (peer.parent / "npm.py").write_text("import sys; open('asked', 'w').write(sys.argv[1])")
    for suite, asked in (("unit", ""), ("interop", str(peer))):
        assert copy.run("bin/test", suite).returncode == 0
        note = copy.root / "asked"
        assert (note.read_text() if note.exists() else "") == asked


def test_a_run_without_any_test_is_a_failure(copy: Copy) -> None:
    done = copy.run("bin/test", "unit", "-k", "nothing_has_this_name")
    assert done.returncode == 5
    assert "no test ran" in done.stderr


def test_a_suite_that_ran_nothing_is_a_failure(copy: Copy) -> None:
    copy.suite("contract", "def not_a_test(): pass")
    done = copy.run("bin/test")
    assert done.returncode == 5
    assert "no test ran in: contract" in done.stderr


def test_a_failing_test_fails_the_command_and_is_counted(copy: Copy) -> None:
    copy.suite("contract", "def test_that_fails(): assert 0")
    done = copy.run("bin/test", "contract", "unit")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("==== 1 passed, 1 failed in ")


@pytest.mark.parametrize(
    "skipping",
    [
        "import pytest\n@pytest.mark.skip(reason='no wish')\ndef test_marked(): pass\n",
        "import pytest\ndef test_inside(): pytest.skip('no wish')\n",
        "import pytest\npytest.skip('no wish', allow_module_level=True)\n",
        "import pytest\npytest.importorskip('no_such_module', reason='no wish')\n",
    ],
    ids=["mark", "call", "module", "import"],
)
def test_a_skipped_test_is_a_failed_test(copy: Copy, skipping: str) -> None:
    copy.suite("contract", skipping)
    done = copy.run("bin/test", "contract")
    assert done.returncode in (1, 2), done.stdout
    assert "skipped, which counts as failed here" in done.stdout
    assert "no wish" in done.stdout


def test_every_command_can_be_run_as_it_lies_there() -> None:
    for name in ("bin/audit", "bin/build", "bin/docs", "bin/fuzz", "bin/test", "bin/up", ".ci/run"):
        assert os.access(ROOT / name, os.X_OK), f"chmod +x {name}"
