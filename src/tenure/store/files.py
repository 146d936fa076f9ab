"""Files that come with a package, and files that only their owner may read."""

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
    """A folder in a package; in an archive by importlib.resources, which is slow to import."""
    spec = find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec else []
    folder: Traversable | None = Path(places[0], *names) if places else None
    if folder is not None and not folder.is_dir():
        from importlib.resources import files

        folder = files(package).joinpath(*names)
    if folder is None or not folder.is_dir():
        raise UsageError(f"package {package} has no folder {'/'.join(names)}/ to load from")
    return folder


def private_file(path: Path) -> None:
    """Creates a file with mode 0600 whatever the umask, or restricts one that exists.

    A file that exists is not opened: closing it would end the locks that SQLite has on it.
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
    """A descriptor of a private file, for reading and writing."""
    private_file(path)
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def private_database(path: Path) -> None:
    """`private_file` for an SQLite file, which passes its mode on to those SQLite makes beside it.

    Those that are there already are restricted as well.
    """
    private_file(path)
    for name in ("-wal", "-shm"):
        _restrict(path.with_name(path.name + name))


def _restrict(path: Path) -> None:
    """Removes other users' rights to a file, if it exists and is ours."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        mode = path.stat().st_mode
        if mode & _OTHERS or not mode & stat.S_IRWXU:
            path.chmod(0o600)


def write_private(path: Path, text: str) -> None:
    """Writes a private file atomically and durably."""
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
    """Creates a folder with mode 0700; refuses one that other users own or may enter.

    A folder of ours that others may enter is restricted if it is empty or holds a file that matches
    `mark`, which shows that it is used for nothing else. `owner` is a further user who may own it.
    """
    for each in reversed([one for one in (path, *path.parents) if not os.path.lexists(one)]):
        with contextlib.suppress(FileExistsError):
            each.mkdir(mode=0o700)
            each.chmod(0o700)
    found, ours = path.lstat(), {os.geteuid(), owner}
    if stat.S_ISLNK(found.st_mode) and found.st_uid in {0, *ours}:
        found = path.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise UsageError(f"{path} is no folder; remove it, or choose another folder")
    if found.st_uid not in ours:
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


def why_untrusted(found: os.stat_result, *, chosen: bool = False) -> str:
    """Why other users may have written a file, or put files into a folder; "" if none may have.

    `chosen`: its user named it, and thereby trusts its owner.
    """
    if found.st_uid not in {0, os.geteuid()} and not chosen:
        return f"belongs to user {found.st_uid}"
    mode = found.st_mode
    if mode & stat.S_IWOTH and (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return f"can be written by all users (mode {stat.S_IMODE(mode):04o})"
    return ""
