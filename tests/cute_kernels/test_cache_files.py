"""The cache folder: what in it is trusted, and what happens where it is not or cannot be used."""

import errno
import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cutefce.cute_kernels import cache_files
from cutefce.cute_kernels.cache_files import CacheError

STRANGER = 54321
"""A user id that is neither this user's nor root's."""
NO_HOME = (
    "import os, pwd, sys\n"
    "from cutefce.cute_kernels import cache_files\n"
    f"pwd.getpwuid = lambda uid: (_ for _ in ()).throw(KeyError({STRANGER}))\n"
    "try: print(cache_files.base_folder())\n"
    "except cache_files.CacheError as error: print('refused:', error)\n"
)


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


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_files_of_root_are_trusted_by_other_users() -> None:
    """A shared cache that root fills, and others read and cannot write."""
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom cutefce.cute_kernels import cache_files\n"
        f"os.setgroups([]); os.setgid({STRANGER}); os.setuid({STRANGER})\n"
        "path = Path(sys.argv[1])\n"
        "print(cache_files.read(path))\n"
        "try: cache_files.write(path, b'other')\n"
        "except PermissionError: print('read-only')"
    )
    with tempfile.TemporaryDirectory() as name:  # pytest's are private
        base = Path(name)
        (base / "sub").mkdir()
        for path in (base, base / "sub"):
            path.chmod(0o755)
        (base / "sub" / "file").write_bytes(b"content")
        result = subprocess.run(
            [sys.executable, "-c", code, str(base / "sub" / "file")],
            env=os.environ | {cache_files.CACHE_VARIABLE: name},
            capture_output=True,
            text=True,
        )
    assert result.stdout.split() == ["b'content'", "read-only"], result.stderr


def test_links_count_as_what_they_point_to(
    file: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path_factory.mktemp("outside") / "file"
    outside.write_bytes(b"linked")
    file.unlink()
    file.symlink_to(outside)
    assert cache_files.read(file) == b"linked"
    outside.chmod(0o666)
    with pytest.raises(CacheError, match="chmod go-w"):
        cache_files.read(file)


def test_files_outside_of_the_cache_folder_are_not_checked(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("outside") / "file"
    path.write_bytes(b"content")
    path.chmod(0o666)
    assert cache_files.read(path) == b"content"


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


@pytest.mark.slow
@pytest.mark.parametrize("given", [None, "~/cache"])
def test_without_a_home_there_is_no_cache_folder(given: str | None, tmp_path: Path) -> None:
    hidden = ("HOME", "XDG_CACHE_HOME", cache_files.CACHE_VARIABLE)
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {} if given is None else {cache_files.CACHE_VARIABLE: given}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    result = subprocess.run(
        [sys.executable, "-c", NO_HOME],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.startswith("refused: no cache folder"), result.stdout
    assert "set CUTEFCE_CACHE_DIR" in result.stdout
    assert not list(tmp_path.iterdir())


def test_an_older_platformdirs_that_knows_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cache_files.CACHE_VARIABLE, raising=False)
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: Path("~/.cache", name))
    with pytest.raises(CacheError, match=r"got '~/.cache/cutefce', expected an absolute path"):
        cache_files.base_folder()


def test_writing_touches_no_other_file(tmp_path: Path) -> None:
    neighbors = [tmp_path / name for name in ("out.tmp", "out.json.tmp", "out.lock", "out.o")]
    for path in neighbors:
        path.write_text("precious")
    out = tmp_path / "out.json"
    with cache_files.lock(out, 1):
        cache_files.write(out, b"content")
    assert all(path.read_text() == "precious" for path in neighbors)
    assert sorted(tmp_path.iterdir()) == sorted([*neighbors, out])


def test_writing_keeps_links_and_permissions(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    real.chmod(0o664)
    link.symlink_to(real.name)
    cache_files.write(link, b"new")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"
    assert stat.S_IMODE(real.stat().st_mode) == 0o664


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


def test_where_no_lock_can_be_made_the_error_comes_at_once(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(OSError), cache_files.lock(Path("/proc/cutefce.json"), 60):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError), cache_files.lock(tmp_path / "file" / "table.json", 60):
        pass
    assert time.monotonic() - begin < 10


def test_a_lock_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    """Although each holder removes the file that the others wait for."""
    path, inside, most = tmp_path / "table.json", [0], [0]

    def work() -> None:
        for _ in range(20):
            with cache_files.lock(path, 60):
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
    with cache_files.lock(path, 1), pytest.raises(TimeoutError), cache_files.lock(path, 0.1):
        pass
    assert removed


def test_a_lock_that_another_holds_is_waited_for_in_vain(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    with (
        cache_files.lock(path, 1),
        pytest.raises(TimeoutError, match="another process holds the lock"),
        cache_files.lock(path, 0.2),
    ):
        pass
