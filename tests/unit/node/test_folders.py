"""Folders in memory: removed by their maker, or by the next one if that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from types import SimpleNamespace

import pytest

import launcher
from collectives.node import folders


def test_a_folder_is_there_inside_and_gone_afterwards(tmp_path):
    with folders.temporary(str(tmp_path)) as path:
        assert os.stat(path).st_mode & 0o777 == 0o700
        (tmp_path / path / "file").write_text("")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_gone_after_an_error_and_its_error_stays(tmp_path):
    with pytest.raises(KeyError), folders.temporary(str(tmp_path)):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("forked", [False, True])
def test_what_a_killed_maker_left_goes_with_the_next_folder(tmp_path, forked):
    program = """
        import os, signal, subprocess, sys
        from pathlib import Path
        from collectives.node import folders
        with folders.temporary(sys.argv[1]) as path:
            Path(path, "file").write_bytes(bytes(100))
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
        with folders.temporary(str(tmp_path)):  # its maker lives: it stays
            assert os.listdir(path) == ["file"]
        maker.send_signal(signal.SIGKILL)
        maker.wait()
        with folders.temporary(str(tmp_path)) as own:
            assert [str(left) for left in tmp_path.iterdir()] == [own]
        if forked:
            os.killpg(maker.pid, signal.SIGKILL)


def test_folders_and_files_of_others_stay(tmp_path, monkeypatch):
    (tmp_path / "unisono-1-file").write_text("")
    (tmp_path / "unisono-2-link").symlink_to(tmp_path)
    (tmp_path / "other").mkdir()
    theirs = tmp_path / "unisono-3-theirs"
    theirs.mkdir()
    fstat, inode = os.fstat, theirs.stat().st_ino

    def of_another_user(descriptor):
        facts = fstat(descriptor)
        uid = facts.st_uid + (facts.st_ino == inode)
        return SimpleNamespace(st_uid=uid, st_dev=facts.st_dev, st_ino=facts.st_ino)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", of_another_user)
        with folders.temporary(str(tmp_path)):
            pass
        assert len(list(tmp_path.iterdir())) == 4
    with folders.temporary(str(tmp_path)):
        assert not theirs.exists()


def test_a_folder_that_a_neighbour_removes_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    make, swept, neighbours = os.mkdir, [], []

    def and_a_neighbour_sweeps(path, mode):
        make(path, mode)
        if len(swept) < 2 and not neighbours:
            swept.append(path)
            neighbours.append(path)
            with folders.temporary(str(tmp_path)):
                neighbours.pop()

    monkeypatch.setattr(os, "mkdir", and_a_neighbour_sweeps)
    with folders.temporary(str(tmp_path)) as path:
        assert [str(left) for left in tmp_path.iterdir()] == [path]
        assert path not in swept


def test_many_makers_at_once_do_not_disturb_each_other(tmp_path):
    errors = []

    def make():
        try:
            for _ in range(50):
                with folders.temporary(str(tmp_path)) as path, open(f"{path}/file", "w"):
                    assert os.listdir(path) == ["file"]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert list(tmp_path.iterdir()) == []


def test_no_folder_without_its_directory(tmp_path):
    with pytest.raises(FileNotFoundError), folders.temporary(str(tmp_path / "none")):
        pass
