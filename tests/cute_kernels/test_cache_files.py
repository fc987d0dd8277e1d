"""The cache folder: what in it is trusted, and what happens where it is not or cannot be used."""

import errno
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cutefce.cute_kernels import cache_files
from cutefce.cute_kernels.cache_files import CacheError

STRANGER = 54321
"""A user id that is neither this user's nor root's."""


def own(path: Path, monkeypatch: pytest.MonkeyPatch, uid: int = STRANGER) -> None:
    """Make `path` belong to another user: truly as root, else as `os.stat` tells it."""
    if os.geteuid() == 0:
        os.chown(path, uid, uid)
        return
    true_stat, number = Path.stat, path.stat().st_ino

    def told(self: Path, **options: bool) -> os.stat_result:
        status = true_stat(self, **options)
        fields = list(status)
        fields[stat.ST_UID] = uid
        return os.stat_result(fields) if status.st_ino == number else status

    monkeypatch.setattr(Path, "stat", told)


@pytest.fixture
def file(folder: Path) -> Path:
    """Return a file in a folder of the cache folder."""
    path = folder / "sub" / "file"
    cache_files.write(path, b"content")
    return path


Harm = Callable[[Path, pytest.MonkeyPatch], None]
HARMS: dict[str, tuple[Harm, str]] = {
    "another owner": (own, "owner uid"),
    "writable by all": (lambda path, _: path.chmod(path.stat().st_mode | 0o002), "chmod go-w"),
    "writable by a group": (lambda path, _: path.chmod(path.stat().st_mode | 0o020), "chmod go-w"),
    "world-writable and sticky": (lambda path, _: path.chmod(0o1777), "chmod go-w"),
}


@pytest.mark.parametrize("part", ["the cache folder", "a folder", "the file"])
@pytest.mark.parametrize(("harm", "said"), HARMS.values(), ids=HARMS)
def test_what_others_may_have_written_is_neither_read_nor_changed(
    harm: Harm, said: str, part: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harmed = {"the cache folder": file.parent.parent, "a folder": file.parent, "the file": file}
    harm(harmed[part], monkeypatch)
    for use in (
        lambda: cache_files.read(file),
        lambda: cache_files.write(file, b"other"),
        lambda: cache_files.remove(file),
    ):
        with pytest.raises(CacheError, match=rf"ignored {harmed[part]}: .*{said}"):
            use()
    assert file.read_bytes() == b"content"
    assert list(file.parent.iterdir()) == [file], "and nothing is written beside it"


def test_new_folders_are_private(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = folder / "a" / "cache"
    monkeypatch.setenv(cache_files.CACHE_VARIABLE, str(base))
    before = os.umask(0o002)
    try:
        cache_files.write(base / "b" / "c" / "file", b"content")
    finally:
        os.umask(before)
    for path in (base, base / "b", base / "b" / "c"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert cache_files.read(base / "b" / "c" / "file") == b"content"


@pytest.mark.parametrize("given", ["relative", "./a", "~nobody-of-this-name/x", "a/~"])
def test_relative_cache_folders_are_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache_files.CACHE_VARIABLE, given)
    with pytest.raises(CacheError, match=r"CUTEFCE_CACHE_DIR"):
        cache_files.base_folder()


def test_a_tilde_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(cache_files.CACHE_VARIABLE, "~/cache")
    assert cache_files.base_folder() == tmp_path / "cache"


def test_writing_touches_no_other_file(tmp_path: Path) -> None:
    neighbors = [tmp_path / name for name in ("out.tmp", "out.json.tmp", "out.lock", "out.o")]
    for path in neighbors:
        path.write_text("precious")
    out = tmp_path / "out.json"
    with cache_files.lock(out):
        cache_files.write(out, b"content")
    assert all(path.read_text() == "precious" for path in neighbors)
    assert sorted(tmp_path.iterdir()) == sorted([*neighbors, out])


@pytest.mark.parametrize("kind", ["folder", "fifo", "device"])
def test_only_regular_files_are_read_written_and_removed(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "it"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/null")  # never this machine's own
    for use in (
        lambda: cache_files.read(path),
        lambda: cache_files.write(path, b""),
        lambda: cache_files.remove(path),
    ):
        with pytest.raises(OSError, match="not a regular file"):
            use()
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="No space left"):
        cache_files.write(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_lock_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    """Although each holder removes the file that the others wait for."""
    path, inside, most = tmp_path / "table.json", [0], [0]

    def work() -> None:
        for _ in range(20):
            with cache_files.lock(path):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0.001)
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert not list(tmp_path.iterdir())


def test_a_lock_of_a_removed_file_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its holder may remove it after another process has opened it."""
    path, own, removed = tmp_path / "table.json", cache_files._flock, list[Path]()

    def flock(descriptor: int) -> bool:
        if not removed:
            removed.extend(tmp_path.iterdir())
            removed[0].unlink()
        return own(descriptor)

    monkeypatch.setattr(cache_files, "_flock", flock)
    monkeypatch.setattr(cache_files, "LOCK_SECONDS", 0.2)
    with cache_files.lock(path), pytest.raises(TimeoutError), cache_files.lock(path):
        pass
    assert removed


def test_a_lock_that_another_holds_is_waited_for_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_files, "LOCK_SECONDS", 0.2)
    path = tmp_path / "table.json"
    with (
        cache_files.lock(path),
        pytest.raises(TimeoutError, match="another process holds the lock"),
        cache_files.lock(path),
    ):
        pass
