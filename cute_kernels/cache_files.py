"""The user's cache folder: where it is, which of its files are trusted, how files are written.

Libraries are code, and tables and verdicts decide which code is launched.  So a file of the cache
folder is read only if nobody else can have written it: the file and each folder from the cache
folder down to it belong to this user or root, and nobody else may write to them.  A link counts as
what it points to.  What is not trusted is neither read nor deleted, and nothing is written there.
Files outside of the cache folder are those of the package, or were named by the user: they are not
checked.  Neither is anything on systems without user ids.
"""

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import platformdirs

CACHE_VARIABLE = "CUTEFCE_CACHE_DIR"
"""Environment variable that names another cache folder."""
PRIVATE = 0o700
"""Permissions of the folders that are made in the cache folder."""
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
LOCK_SECONDS, POLL_SECONDS = 1200, 0.05
"""How long a process waits for a lock, which another one holds while it verifies all kernels, and
how often it tries again."""


class CacheError(OSError):
    """The cache folder or a part of it cannot be used; the message says why and what to do."""


def base_folder() -> Path:
    """Return the absolute path of the cache folder, which may not exist.

    Raises:
        CacheError: if there is no home folder, or the path in the environment is relative.
    """
    given = os.environ.get(CACHE_VARIABLE)
    try:
        folder = Path(given).expanduser() if given else platformdirs.user_cache_path("cutefce")
    except RuntimeError as error:
        raise CacheError(
            f"no cache folder: {error}; set {CACHE_VARIABLE} to an absolute path"
        ) from error
    if not folder.is_absolute():
        raise CacheError(
            f"no cache folder: got {str(folder)!r}, expected an absolute path; set {CACHE_VARIABLE}"
        )
    return folder


def read(path: Path) -> bytes:
    """Return the contents of a file.

    Raises:
        CacheError: if it is of the cache folder and not trusted.
        OSError: if it cannot be read, or is not a regular file.
    """
    _check_file(path)
    return path.read_bytes()


def remove(path: Path) -> None:
    """Remove a file.

    Raises:
        CacheError: if it is of the cache folder and not trusted.
        OSError: if it cannot be removed, or is not a regular file.
    """
    _check_file(path)
    path.unlink()


def check(path: Path) -> None:
    """Raise CacheError if `path` is of the cache folder and not trusted, OSError without it."""
    for part in _parts(path):
        _check(part)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it; in the cache folder, nobody else may enter them.

    Raises:
        CacheError: if a folder is of the cache folder and not trusted.
        OSError: if it cannot be made.
    """
    parts = _parts(path)
    for part in parts:
        if not part.exists():
            part.parent.mkdir(parents=True, exist_ok=True)
            part.mkdir(PRIVATE, exist_ok=True)
        _check(part)
    if not parts:
        path.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold the lock of the file `path`, which need not exist; make its folder.

    The lock is a hidden file beside it, which is removed in the end.

    Raises:
        CacheError: if the folder is of the cache folder and not trusted.
        OSError: if there can be no lock, or another process holds it for longer than
            `LOCK_SECONDS`.
    """
    path = _target(path)
    name, end = path.with_name(f".{path.name}.lock"), time.monotonic() + LOCK_SECONDS
    while (descriptor := _acquire(name)) is None:
        if time.monotonic() > end:
            raise TimeoutError(errno.ETIMEDOUT, "another process holds the lock", str(name))
        time.sleep(POLL_SECONDS)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            name.unlink()
        os.close(descriptor)


def _acquire(name: Path) -> int | None:
    """Return a descriptor of the lock file `name` that holds its lock, None if another one does."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(name, flags, 0o644)
    try:
        if _flock(descriptor) and os.path.samestat(os.fstat(descriptor), name.stat()):
            return descriptor
    except FileNotFoundError:
        pass  # the process that held it has removed it
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _flock(descriptor: int) -> bool:
    """Lock an open file unless another process does; where there are no locks, go without."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except ImportError:
        return True
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    return True


def write(path: Path, content: bytes) -> None:
    """Write a file; readers see either the old or the new contents.

    Makes the folder.  A link stays, and what it points to is replaced.

    Raises:
        CacheError: if the file or its folder is of the cache folder and not trusted.
        OSError: if it cannot be written, or is not a regular file; nothing has changed then.
    """
    path = _target(path)
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        if mode is not None:
            temporary.chmod(mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _target(path: Path) -> Path:
    """Make the folder of `path`; return what `path` points to, if that may be written."""
    make_folder(path.parent)
    if path.exists():
        _check_file(path)
    return Path(os.path.realpath(path))


def _parts(path: Path) -> list[Path]:
    """Return the cache folder, the folders down to `path` and `path`; nothing if it is outside."""
    try:
        base = base_folder()
    except CacheError:
        return []
    if not path.is_relative_to(base):
        return []
    return [part for part in (*reversed(path.parents), path) if part.is_relative_to(base)]


def _check_file(path: Path) -> None:
    """Raise OSError unless `path` is a regular file, and CacheError if it is not trusted."""
    check(path)
    # others would block a reader, as a FIFO does, or be replaced by a writer
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def _check(path: Path) -> None:
    """Raise CacheError unless only this user and root can have written to `path`."""
    if not hasattr(os, "geteuid"):
        return
    status, user = path.stat(), os.geteuid()
    if status.st_uid not in (user, 0):
        raise CacheError(
            f"ignored {path}: got owner uid {status.st_uid}, expected uid {user} or root; "
            f"remove it, or set {CACHE_VARIABLE} to a folder of yours"
        )
    if status.st_mode & WRITABLE_BY_OTHERS:
        raise CacheError(
            f"ignored {path}: got mode {stat.S_IMODE(status.st_mode):o}, expected that only its "
            f"owner may write; if all in it is yours, run: chmod go-w {path}"
        )
