"""Folders inside packages, and files and folders that only their owner may read."""

from __future__ import annotations

import contextlib
import os
import stat
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tenure.core.errors import UsageError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

_OTHERS = 0o077


def package_folder(package: str, *names: str) -> Traversable:
    """A folder inside a package."""
    spec = find_spec(package)
    roots = list(spec.submodule_search_locations or ()) if spec else []
    folder: Traversable | None = Path(roots[0], *names) if roots else None
    if folder is not None and not folder.is_dir():
        from importlib.resources import files  # slow to import, and only archives need it

        folder = files(package).joinpath(*names)
    if folder is None or not folder.is_dir():
        raise UsageError(f"package {package} has no folder {'/'.join(names)}/ to load from")
    return folder


def private_file(path: Path) -> None:
    """Create a file with mode 0600 whatever the umask, or restrict one that exists.

    An existing file is not opened, because closing it would release SQLite's locks on it.
    """
    target = os.path.realpath(path)
    try:
        fd = os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        _restrict(Path(target))
    else:
        os.fchmod(fd, 0o600)
        os.close(fd)


def open_private(path: Path) -> int:
    """Open a private file for reading and writing; its descriptor."""
    private_file(path)
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def private_database(path: Path) -> None:
    """`private_file` for an SQLite database.

    SQLite gives the mode of the file to those that it creates beside it. Existing ones are
    restricted as well.
    """
    private_file(path)
    for name in ("-wal", "-shm"):
        _restrict(path.with_name(path.name + name))


def _restrict(path: Path) -> None:
    """Remove other users' rights to a file, if it exists and is ours."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        mode = path.stat().st_mode
        if mode & _OTHERS or not mode & stat.S_IRWXU:
            path.chmod(0o600)


def write_private(path: Path, text: str) -> None:
    """Write a private file atomically and durably."""
    import tempfile  # slow to import, and many commands write nothing

    fd, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            os.fchmod(fd, 0o600)
            file.write(text)
            file.flush()
            os.fsync(fd)
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def private_folder(path: Path, *, mark: str = "", owner: int | None = None) -> None:
    """Create a folder with mode 0700; refuse one that other users own or may enter.

    A folder of ours that others may enter is restricted if it is empty, or if it has a file that
    matches `mark`, because then it is used for nothing else. `owner` is another user who may own
    it.
    """
    for each in reversed([one for one in (path, *path.parents) if not os.path.lexists(one)]):
        with contextlib.suppress(FileExistsError):
            each.mkdir(mode=0o700)
            each.chmod(0o700)
    found, owners = path.lstat(), {os.geteuid(), owner}
    if stat.S_ISLNK(found.st_mode) and found.st_uid in {0, *owners}:
        found = path.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise UsageError(f"{path} is no folder; remove it, or choose another folder")
    if found.st_uid not in owners:
        raise UsageError(
            f"{path} belongs to user {found.st_uid}, who could read and change what is kept there; "
            "choose a folder of your own"
        )
    if stat.S_IMODE(found.st_mode) & 0o777 == 0o700:
        return
    if found.st_mode & _OTHERS and any(path.iterdir()) and not (mark and any(path.glob(mark))):
        raise UsageError(
            f"{path} is open to other users (mode {stat.S_IMODE(found.st_mode):04o}); "
            f"run `chmod 700 {path}`, or choose a new folder"
        )
    path.chmod(0o700)
