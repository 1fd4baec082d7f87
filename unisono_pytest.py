"""pytest plugin: the fixture `unisono_world`, ranks as threads; imports no package at the start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collectives.testing import World

MARKER = "unisono_ranks"


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    text = f"{MARKER}(*numbers): numbers of ranks of the fixture unisono_world (1, 2 and 3)"
    config.addinivalue_line("markers", text)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeat a test of `unisono_world` with each number of ranks."""
    if "unisono_world" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker(MARKER)
        numbers = marker.args if marker else (1, 2, 3)
        ids = [f"{number} rank{'s' * (number > 1)}" for number in numbers]
        metafunc.parametrize("unisono_world", numbers, indirect=True, ids=ids)


@pytest.fixture
def unisono_world(request: pytest.FixtureRequest) -> World:
    """Ranks as threads: `unisono_world.run(function)`, `unisono_world.size`.

    The test runs with 1, 2 and 3 ranks; `@pytest.mark.unisono_ranks(2, 4)` chooses others.
    """
    from collectives.testing import World

    return World(request.param)
