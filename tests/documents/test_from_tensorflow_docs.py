"""The programs of docs/from-tensorflow.md print what it shows, and its tables name what exists."""

from __future__ import annotations

import pkgutil
import re
from operator import attrgetter

import pytest

import programs
import strategies
from launcher import ROOT
from requirements import installed

PATH = ROOT / "docs" / "from-tensorflow.md"
TEXT = PATH.read_text()
PAGE = programs.read(PATH)
NEEDS = {"fit.py": "torch", "tpu.py": "jax"}

# Every subject of distributed TensorFlow 1 and of tf.distribute that the page has to show as code.
SUBJECTS = [
    "ClusterSpec", "Server", "replica_device_setter", "GreedyLoadBalancingStrategy", "container",
    "fixed_size_partitioner", "FIFOQueue", "RandomShuffleQueue", "dequeue_many", "RunOptions",
    "TextLineReader", "decode_csv", "string_input_producer", "shuffle_batch", "Coordinator",
    "QueueRunner", "start_queue_runners", "SyncReplicasOptimizer", "MonitoredTrainingSession",
    "StopAtStepHook", "Saver", "Experiment", "learn_runner", "MirroredStrategy", "scope", "run",
    "reduce", "experimental_distribute_dataset", "distribute_datasets_from_function", "gather",
    "VariableSynchronization", "TF_CONFIG", "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy", "ClusterCoordinator", "TPUStrategy", "compile", "fit",
    "ModelCheckpoint", "BackupAndRestore",
]  # fmt: skip


def file_of(session: programs.Session) -> str:
    (name,) = {word for line in session.commands for word in line.split() if ".py" in word}
    return name


def listings() -> list[str]:
    """Return the listings of TensorFlow: the blocks of Python that are no file."""
    blocks = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    return [block for block in blocks if block not in PAGE.files.values()]


@pytest.mark.parametrize("session", PAGE.sessions, ids=file_of)
def test_a_program_prints_what_the_page_shows(session, tmp_path):
    name = file_of(session)
    if name in NEEDS:
        installed(NEEDS[name])
    page = programs.Page({name: PAGE.files[name]}, [session])
    assert programs.try_out(page, tmp_path, 90) == 1


def test_every_program_has_a_listing_of_tensorflow_before_it():
    assert len(listings()) == len(PAGE.files) == len(PAGE.sessions)
    for listing in listings():
        compile(listing, "listing", "exec")
        assert "strategies" not in listing


def test_every_subject_is_in_a_listing():
    words = set(re.findall(r"\w+", " ".join(listings())))
    assert set(SUBJECTS) <= words


def test_names_of_ours_exist():
    named = set(re.findall(r"`strategies\.([A-Za-z_.]+)", TEXT))
    assert len(named) > 5
    # Not imported, because it may need a package that is absent.
    modules = {module.name for module in pkgutil.iter_modules(strategies.__path__)}
    for name in named - modules:
        attrgetter(name)(strategies)
