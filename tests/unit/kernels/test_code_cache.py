"""The code cache: its folders, the age of its files, and which owners and modes it accepts."""

import os
import stat
import time
from pathlib import Path

import pytest

from collectives.kernels.code_cache import CacheEntry

DAY = 86400

HOME = Path("home/.cache/unisono")
TEMPORARY = Path("tmp") / f"unisono-cache-{os.geteuid()}"


@pytest.fixture
def user(tmp_path, monkeypatch):
    """A user with an empty home and an empty folder for temporary files."""
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    return tmp_path


@pytest.fixture
def entry():
    return CacheEntry("sum.float32", "o", b"x + y")


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def nothing(user, monkeypatch):
    pass


def cache_home(user, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(user / "other"))


def chosen(user, monkeypatch):
    cache_home(user, monkeypatch)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(user / "one" / "two"))


def no_folder(user, monkeypatch):
    (user / "home" / ".cache").write_text("in the way")


def no_home(user, monkeypatch):
    def missing():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", missing)


def others_write(user, monkeypatch):
    (user / "home" / ".cache" / "unisono").mkdir(parents=True)
    (user / "home" / ".cache" / "unisono").chmod(0o777)


@pytest.mark.parametrize(
    ("where", "folder"),
    [
        (nothing, HOME),
        (cache_home, Path("other/unisono")),
        (chosen, Path("one/two/unisono")),
        (no_folder, TEMPORARY),
        (no_home, TEMPORARY),
        (others_write, TEMPORARY),
    ],
)
def test_the_folder_of_compiled_code(user, entry, monkeypatch, where, folder):
    where(user, monkeypatch)
    entry.write(b"code")
    assert entry.read() == b"code"
    (file,) = [path for path in files(user) if path.suffix == ".o"]
    assert file.parent == user / folder
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_chosen_folder_is_the_only_one(user, entry, monkeypatch):
    entry.write(b"code")
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/dev/null/nowhere")
    entry.write(b"code")
    assert entry.read() is None
    assert len(files(user)) == 1


def test_code_made_from_something_else_has_another_file(user, entry):
    other = CacheEntry("sum.float32", "o", b"x - y")
    entry.write(b"code")
    assert other.read() is None
    other.write(b"other code")
    assert (entry.read(), other.read()) == (b"code", b"other code")
    # A renamed file does not match its name.
    one, another = files(user)
    one.rename(another)
    assert (entry.read(), other.read()).count(None) == 2


@pytest.mark.parametrize("mode", [0o666, 0o620])
@pytest.mark.parametrize("what", ["folder", "file"])
def test_no_code_is_loaded_that_others_may_have_written(user, entry, mode, what):
    entry.write(b"code")
    (file,) = files(user)
    path = file if what == "file" else file.parent
    path.chmod(mode if what == "file" else mode | 0o111)
    assert entry.read() is None
    path.chmod(0o700)
    assert entry.read() == b"code"


@pytest.mark.parametrize("owner", [0, os.geteuid(), 4321])
@pytest.mark.parametrize("kind", [stat.S_ISDIR, stat.S_ISREG])
def test_code_of_another_user_is_not_loaded(user, entry, monkeypatch, owner, kind):
    entry.write(b"code")
    fstat = os.fstat

    def of_owner(descriptor):
        facts = fstat(descriptor)
        if not kind(facts.st_mode):
            return facts
        return os.stat_result((*facts[:4], owner, *facts[5:]))

    monkeypatch.setattr(os, "fstat", of_owner)
    assert entry.read() == (None if owner == 4321 else b"code")


def test_a_folder_that_others_may_write_to_is_warned_of_once(user, entry, monkeypatch, caplog):
    others_write(user, monkeypatch)
    for _ in range(2):
        entry.write(b"code")
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert str(user / HOME) in said
    assert "0777" in said


def test_files_that_no_process_has_read_for_long_are_removed(user, entry, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(user / "old"))
    days = {"unread": 91, "read": 89, "fresh": 1}
    entries = {name: CacheEntry(name, "o", b"") for name in days}
    for name, one in entries.items():
        one.write(b"code")
        (file,) = (user / "old" / "unisono").glob(f"{name}.*")
        os.utime(file, (time.time(), time.time() - days[name] * DAY))
    notes = user / "old" / "unisono" / "notes.o"  # of the user
    notes.touch()
    os.utime(notes, (0, 0))
    # A process searches each folder only once.
    (user / "old").rename(user / "new")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(user / "new"))
    assert entries["read"].read() == b"code"
    entry.write(b"code")
    assert [path.name.split(".")[0] for path in files(user)] == ["fresh", "notes", "read", "sum"]
    (read,) = (user / "new" / "unisono").glob("read.*")
    assert time.time() - read.stat().st_mtime < DAY
