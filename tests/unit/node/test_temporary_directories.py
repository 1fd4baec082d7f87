"""Folders in memory: removed by their maker, or by the next maker if it was killed; no others."""

import os
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
from calls import together

import launcher
from collectives.node import temporary_directories


def test_a_folder_is_there_inside_and_gone_afterwards(tmp_path):
    with temporary_directories.temporary(str(tmp_path)) as path:
        assert os.stat(path).st_mode & 0o777 == 0o700
        (tmp_path / path / "segment").write_text("")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_gone_after_an_error_and_its_error_stays(tmp_path):
    with pytest.raises(KeyError), temporary_directories.temporary(str(tmp_path)):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("forked", [False, True])
def test_what_a_killed_maker_left_goes_with_the_next_folder(tmp_path, forked):
    program = """
        import os, signal, subprocess, sys
        from pathlib import Path
        from collectives.node import temporary_directories as folders
        with folders.temporary(sys.argv[1]) as path:
            Path(path, "segment").write_bytes(bytes(100))
            if sys.argv[2] == "True":  # a program that outlives its parent does not hold the lock
                subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL)
            print(path, flush=True)
            sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path), str(forked)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=launcher.ROOT,
        start_new_session=True,
    ) as maker:  # fmt: skip
        path = maker.stdout.readline().strip()
        with temporary_directories.temporary(str(tmp_path)):  # its maker lives: it stays
            assert sorted(os.listdir(path)) == ["mark", "segment"]
        maker.send_signal(signal.SIGKILL)
        maker.wait()
        with temporary_directories.temporary(str(tmp_path)) as own:
            assert [str(left) for left in tmp_path.iterdir()] == [own]
        if forked:
            os.killpg(maker.pid, signal.SIGKILL)


# The folder of a killed maker.
ABANDONED = "unisono-4711-0123456789abcdef"
MARK = b"temporary folder of the library Unisono, removed by it\n"
CONTENT = {"mark": MARK, "segment": b"1"}


def abandoned(parent, name=ABANDONED, content=CONTENT):
    folder = parent / name
    folder.mkdir()
    for file, written in content.items():
        (folder / file).write_bytes(written)
    return folder


@pytest.mark.parametrize("content", [CONTENT, {"mark": MARK}, {"mark": b""}, {}])
def test_an_abandoned_folder_is_removed(tmp_path, content):
    abandoned(tmp_path, content=content)
    with temporary_directories.temporary(str(tmp_path)):
        pass
    assert list(tmp_path.iterdir()) == []


def beside(folder, name):
    (folder / name).write_text("of the user")


def linked(folder, name):
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(folder.parent / "results" / "model.bin")


# Folders and files that differ from an abandoned folder.
OF_USERS = {
    "results of the user": lambda parent: abandoned(
        parent, "unisono-my-results", {"model.bin": b"1"}
    ),
    "an empty folder of the user": lambda parent: abandoned(parent, "unisono-my-results", {}),
    "flight records": lambda parent: abandoned(
        parent, "unisono-recorder-4711", {"rank-0.json": b"{}"}
    ),
    "another name": lambda parent: abandoned(parent, f"{ABANDONED}-saved"),
    "no mark": lambda parent: abandoned(parent, content={"segment": b"1"}),
    "another mark": lambda parent: abandoned(parent, content=CONTENT | {"mark": b"mine"}),
    "an empty mark": lambda parent: abandoned(parent, content=CONTENT | {"mark": b""}),
    "a file of the user": lambda parent: beside(abandoned(parent), "notes.txt"),
    "a folder of the user": lambda parent: (abandoned(parent) / "mine").mkdir(),
    "a folder in place of a file": lambda parent: (
        abandoned(parent, content={"mark": MARK}) / "segment"
    ).mkdir(),
    "a folder in place of the mark": lambda parent: (
        abandoned(parent, content={}) / "mark"
    ).mkdir(),
    "a link in place of a file": lambda parent: linked(abandoned(parent), "segment"),
    "a link in place of the mark": lambda parent: linked(abandoned(parent), "mark"),
    "a link in place of the folder": lambda parent: (parent / ABANDONED).symlink_to(
        abandoned(parent / "results")
    ),
    "a file in place of the folder": lambda parent: beside(parent, ABANDONED),
}


@pytest.mark.parametrize("kind", OF_USERS)
def test_what_is_not_an_abandoned_folder_stays(tmp_path, kind):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "model.bin").write_bytes(b"1")
    OF_USERS[kind](tmp_path)
    before = everything(tmp_path)
    with temporary_directories.temporary(str(tmp_path)):
        pass
    assert everything(tmp_path) == before


def everything(root):
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
    }


def test_a_folder_of_another_user_stays(tmp_path, monkeypatch):
    theirs = abandoned(tmp_path)
    fstat, inode = os.fstat, theirs.stat().st_ino

    def of_another_user(descriptor):
        facts = fstat(descriptor)
        uid = facts.st_uid + (facts.st_ino == inode)
        return SimpleNamespace(
            st_uid=uid, st_dev=facts.st_dev, st_ino=facts.st_ino, st_mode=facts.st_mode
        )

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", of_another_user)
        with temporary_directories.temporary(str(tmp_path)):
            pass
        assert theirs.exists()
    with temporary_directories.temporary(str(tmp_path)):
        assert not theirs.exists()


def test_a_file_that_a_user_puts_into_the_folder_stays(tmp_path):
    with temporary_directories.temporary(str(tmp_path)) as path:
        beside(tmp_path / path, "notes.txt")
    assert (tmp_path / path / "notes.txt").read_text() == "of the user"


def test_a_folder_that_a_neighbour_removes_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    make, swept, neighbours = os.mkdir, [], []

    def and_a_neighbour_sweeps(path, mode):
        make(path, mode)
        if len(swept) < 2 and not neighbours:
            swept.append(path)
            neighbours.append(path)
            with temporary_directories.temporary(str(tmp_path)):
                neighbours.pop()

    monkeypatch.setattr(os, "mkdir", and_a_neighbour_sweeps)
    with temporary_directories.temporary(str(tmp_path)) as path:
        assert [str(left) for left in tmp_path.iterdir()] == [path]
        assert path not in swept


def test_many_makers_at_once_do_not_disturb_each_other(tmp_path):
    def make(count):
        for _ in range(count):
            with (
                temporary_directories.temporary(str(tmp_path)) as path,
                open(f"{path}/segment", "w"),
            ):
                assert sorted(os.listdir(path)) == ["mark", "segment"]

    together(make, [50] * 4)
    assert list(tmp_path.iterdir()) == []


def test_no_folder_without_its_directory(tmp_path):
    with pytest.raises(FileNotFoundError), temporary_directories.temporary(str(tmp_path / "none")):
        pass
