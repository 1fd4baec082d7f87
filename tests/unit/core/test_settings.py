"""Environment variables: defaults, types, and errors that name them."""

import re
from pathlib import Path

import pytest

from collectives.core import settings
from launcher import ROOT


def test_without_variables_the_defaults_hold():
    assert settings.from_environment({}) == settings.Settings()
    assert settings.from_environment({"UNISONO_TIMEOUT": " ", "UNISONO_CHECK": ""}).timeout == 600


def test_every_variable_is_read():
    read = settings.from_environment(
        {
            "UNISONO_TIMEOUT": "1.5",
            "UNISONO_STALL_WARNING": "7",
            "UNISONO_CHECK": "sample",
            "UNISONO_SHARED_MEMORY": "off",
            "UNISONO_STORES": "plain",
            "UNISONO_RECORDER_DIR": "records",
            "UNISONO_TIMELINE": "timeline",
            "UNISONO_ABORT_ON_EXCEPTION": "0",
            "UNISONO_TRACEBACK": "full",
            "UNISONO_MPI_SETTINGS": "0",
            "UNISONO_CUDA_AWARE": "on",
            "UNISONO_NCCL": "on",
            "UNISONO_WAIT_LIMIT": "2",
            "UNISONO_CALL_THREADS": "5",
            "UNISONO_UPDATE_THREADS": "3",
        }
    )
    expected = settings.Settings(
        1.5, 7.0, "sample", None, "plain", "records", "timeline", False, "full", False,
        cuda_aware="on", nccl="on", wait_limit=2.0, call_threads=5, update_threads=3,
    )  # fmt: skip
    assert read == expected


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("UNISONO_TIMEOUT", "soon", "expected seconds > 0"),
        ("UNISONO_TIMEOUT", "0", "expected seconds > 0"),
        ("UNISONO_TIMEOUT", "nan", "expected seconds > 0"),
        ("UNISONO_STALL_WARNING", "-1", "expected seconds > 0"),
        ("UNISONO_CHECK", "never", "must be one of off sample always"),
        ("UNISONO_STORES", "fast", "must be one of auto plain streaming"),
        ("UNISONO_ABORT_ON_EXCEPTION", "yes", "expected 0 or 1"),
        ("UNISONO_TRACEBACK", "1", "must be one of short full"),
        ("UNISONO_CUDA_AWARE", "yes", "must be one of auto on off"),
        ("UNISONO_NCCL", "1", "must be one of on off"),
        ("UNISONO_WAIT_LIMIT", "0", "expected seconds > 0"),
        ("UNISONO_CALL_THREADS", "0", "expected an integer > 0"),
        ("UNISONO_UPDATE_THREADS", "many", "expected an integer > 0"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(variable, value, expected):
    with pytest.raises(ValueError, match=rf"{variable} .*{expected}, got '{value}'"):
        settings.from_environment({variable: value})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("UNISONO_TIMOUT", "UNISONO_TIMEOUT"),
        ("UNISONO_SHAREDMEMORY", "UNISONO_SHARED_MEMORY"),
        ("UNISONO_timeout", "UNISONO_TIMEOUT"),
        ("UNISONO_NETWORK", "UNISONO_NETWORK_LINK"),
        ("UNISONO_CHEKC", "UNISONO_CHECK"),
    ],
)
def test_a_variable_that_nothing_reads_is_named_with_the_nearest_that_is(name, meant):
    (text,) = settings.unknown_variables(
        {name: "1", "UNISONO_CHECK": "off", "UNISON": "", "PATH": "/bin"}
    )
    assert text == f"settings: {name} is not read, expected {meant}"


def test_a_variable_that_is_near_to_none_is_told_all_of_them():
    (text,) = settings.unknown_variables({"UNISONO_XYZZY": "1"})
    assert all(variable in text for variable in settings.VARIABLES)


def test_variables_of_batch_scripts_and_tests_are_no_slips():
    files = [*(ROOT / "slurm").iterdir(), *(ROOT / "tests").rglob("*.py"), ROOT / "Makefile"]
    slips = {Path(__file__).name, "test_oversubscription.py"}  # which make some on purpose
    texts = [file.read_text() for file in files if file.is_file() and file.name not in slips]
    named = {name for text in texts for name in re.findall(r"UNISONO_[A-Z_]*[A-Z]", text)}
    assert {"UNISONO_REQUIRE", "UNISONO_PROGRAM", "UNISONO_CLUSTER"} <= named
    assert settings.unknown_variables(dict.fromkeys(named, "1")) == []
