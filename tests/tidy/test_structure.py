"""The shape of the source: small pieces, honest names, nothing dead, no leftovers."""

import ast
import re
import subprocess
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from tests.tidy.reading import (
    CONTRACTS,
    PACKAGE,
    ROOT,
    SRC,
    TESTS,
    contract_folders,
    files,
    functions,
    listed,
    module_name,
    shown,
    text,
    tree,
)

MODULE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
PACKAGE_MODULES_MAX = 12
LARGER_PACKAGES = {
    "core": 18,  # a word of the glossary each
    "cli": 16,  # a group of commands each
}
CHAPTER_LINES_MAX = 150
# Words of our own for things that have a usual name, which readers had to learn.
PRIVATE_WORDS = re.compile(
    r"^_?\w*(House|Street|Door|Desk|Crew|Ways|Wish|Herd|Ear|Turnstile|Tape|Reel|Bell|Words)$"
)
BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "base", "manager", "misc"}

# Spelt in pieces, so that this file does not find itself.
LEFTOVERS = re.compile(
    r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"]) + r")\b"
)
MACHINE_PATHS = re.compile(
    r"(?<![\w.:/}$-])/(?:"
    + "|".join(["ro" + "ot", "wo" + "rk", "ho" + "me/[a-z]", "Us" + "ers", "tm" + "p/[a-z]"])
    + r")(?:/|\b)"
)
# Modules that applications import, and nothing of ours.
FOR_APPLICATIONS = {"tenure.sync", "tenure.testing"}
MODULES = files(SRC, "*.py")


def own_text_files() -> list[Path]:
    patterns = ("*.py", "*.md", "*.lua", "*.sql", "*.toml", "*.yaml", "*.service", "*.sh")
    commands = [path for path in (ROOT / "bin").iterdir() if path.is_file()]
    return sorted({path for pattern in patterns for path in files(ROOT, pattern)} | set(commands))


def test_the_old_name_is_nowhere_in_the_project() -> None:
    old = re.compile("lease" + "hold", re.IGNORECASE)  # on PyPI this name is another project's
    out = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    names = [name for name in out.split("\0") if name and (ROOT / name).is_file()]
    found = [
        name
        for name in names
        if old.search(name) or old.search((ROOT / name).read_text("utf-8", "replace"))
    ]
    assert found == []


def test_no_module_is_longer_than_a_reader_can_hold() -> None:
    lengths = {path: len(text(path).splitlines()) for path in MODULES}
    problems = [
        f"{shown(path)}: {length} lines, at most {MODULE_LINES_MAX}: cut it by subject"
        for path, length in lengths.items()
        if length > MODULE_LINES_MAX
    ]
    assert not problems, listed(problems)


def test_no_package_has_more_modules_than_a_reader_can_hold() -> None:
    counts = Counter(path.parent for path in MODULES if not path.name.startswith("__"))
    problems = [
        f"{shown(folder)}: {count} modules: merge those that are read together"
        for folder, count in counts.items()
        if count > LARGER_PACKAGES.get(str(folder.relative_to(PACKAGE)), PACKAGE_MODULES_MAX)
    ]
    assert not problems, listed(problems)


def test_no_small_module_is_only_a_chapter_of_its_one_importer() -> None:
    names = {module_name(path): path for path in MODULES}
    importers: dict[str, set[str]] = {name: set() for name in names}
    for name, path in names.items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom) and node.module:
                found = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                for each in set(found) & set(names) - {name}:
                    importers[each].add(name)
    problems = [
        f"{shown(names[name])}: only {importer} imports it: make it a part of that"
        for name, (importer, *others) in ((n, sorted(i)) for n, i in importers.items() if i)
        if not others
        and names[name].name != "__init__.py"
        and importer.rpartition(".")[0] == name.rpartition(".")[0]
        and len(text(names[name]).splitlines()) < CHAPTER_LINES_MAX
    ]
    assert not problems, listed(problems)


def test_classes_are_named_by_the_usual_words() -> None:
    problems = [
        f"{shown(path, node.lineno)}: {node.name}: the glossary in ARCHITECTURE.md has the words"
        for path in MODULES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef) and PRIVATE_WORDS.match(node.name)
    ]
    assert not problems, listed(problems)


def test_no_function_is_longer_than_a_screen() -> None:
    problems = [
        f"{shown(path, function.lineno)}: {length} lines, at most {FUNCTION_LINES_MAX}"
        for path in MODULES
        for function in functions(path)
        if (length := (function.end_lineno or 0) - function.lineno + 1) > FUNCTION_LINES_MAX
    ]
    assert not problems, listed(problems)


def test_no_module_has_a_name_that_says_nothing() -> None:
    paths = [*MODULES, *files(TESTS, "*.py"), *files(ROOT / "bin", "*.py")]
    problems = [
        f"{shown(path)}: name it for its subject"
        for path in paths
        if BANNED_NAMES & {path.stem.lstrip("_"), path.parent.name}
    ]
    assert not problems, listed(problems)


def test_no_unfinished_work_is_left_behind() -> None:
    problems = [
        f"{shown(path, number)}: {line.strip()}"
        for path in own_text_files()
        for number, line in enumerate(text(path).splitlines(), 1)
        if LEFTOVERS.search(line)
    ]
    assert not problems, listed(problems)


def test_nothing_in_the_source_is_left_unimplemented() -> None:
    problems = [
        shown(path, node.lineno)
        for path in MODULES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Name) and node.id == "NotImplementedError"
    ]
    assert not problems, listed(problems)


def test_only_the_command_line_prints() -> None:
    problems = [
        f"{shown(path, node.lineno)}: log it, or return it to the command that shows it"
        for path in MODULES
        if not path.is_relative_to(PACKAGE / "cli")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert not problems, listed(problems)


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    problems = [
        f"{shown(path, number)}: {line.strip()}"
        for path in own_text_files()
        for number, line in enumerate(text(path).splitlines(), 1)
        if MACHINE_PATHS.search(line)
    ]
    assert not problems, listed(problems)


def imported_by(path: Path) -> set[str]:
    """Every dotted name that a module imports, and for `from a import b` both `a` and `a.b`."""
    package = (
        module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    )
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            names |= {origin} | {f"{origin}.{alias.name}" for alias in node.names}
    return names


def looked_up_by(path: Path) -> set[str]:
    """Modules named in strings: loaded when first used, or started as a program.

    `f"tenure.cli.{name}"` reaches what the same file's other strings name.
    """
    words = {
        node.value.partition(":")[0]
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    names = words | {f"tenure.{word}" for word in words}
    prefixes = {word for word in words if word.startswith("tenure.") and word.endswith(".")}
    names |= {prefix + word for prefix in prefixes for word in words}
    programs = {path.with_name(word) for word in words if word.endswith(".py") and "/" not in word}
    return names | {module_name(program) for program in programs if program.exists()}


def entries() -> set[str]:
    project = tomllib.loads(text(ROOT / "pyproject.toml"))["project"]
    scripts = {target.partition(":")[0] for target in project["scripts"].values()}
    return scripts | FOR_APPLICATIONS


def test_every_module_is_used_by_another_one() -> None:
    used = entries()
    for path in MODULES:
        used |= (imported_by(path) | looked_up_by(path)) - {module_name(path)}
    problems = [
        f"{shown(path)}: nothing in src imports {module_name(path)}"
        for path in MODULES
        if path.name not in ("__init__.py", "__main__.py") and module_name(path) not in used
    ]
    assert not problems, listed(problems)


@pytest.mark.parametrize("folder", contract_folders(), ids=lambda folder: folder.name)
def test_a_contract_folder_holds_all_that_a_contract_needs(folder: Path) -> None:
    needed = ("SPEC.md", "DEVIATIONS.md", "__init__.py")
    missing = [name for name in needed if not (folder / name).exists()]
    assert not missing, f"{shown(folder)} lacks {', '.join(missing)}"
    assert "CONTRACT" in bound_in(folder / "__init__.py"), f"{shown(folder)} has no descriptor"


def bound_in(path: Path) -> set[str]:
    """The names that a module defines or imports at its top level."""
    if not path.exists():
        return set()
    names: set[str] = set()
    for node in tree(path).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def test_the_contracts_package_holds_folders_only() -> None:
    """What two contracts share belongs into a layer below them."""
    loose = [shown(path) for path in CONTRACTS.glob("*.py") if path.name != "__init__.py"]
    assert not loose, listed(loose)
