"""Structures in shared memory: which fields share cache lines, and how Python sees them."""

import numpy as np
import pytest

from collectives.node import control_block
from collectives.node.control_block import BLOCK, HEADER, STATUS_ENTRY

LINE_PAIR = 128  # bytes of two cache lines, which processors fetch together


def fields(dtype):
    return {name: field[:2] for name, field in dtype.fields.items()}


def test_ranks_share_no_cache_line_of_headers_and_status_entries():
    assert HEADER.itemsize % LINE_PAIR == 0
    assert STATUS_ENTRY.itemsize == LINE_PAIR


def test_all_that_ranks_poll_is_fetched_together():
    polled = [name for name in HEADER.names if name != "durations"]
    ends = [fields(HEADER)[name][1] + HEADER[name].itemsize for name in polled]
    assert max(ends) <= LINE_PAIR


def test_the_result_follows_the_contribution():
    # `buffer_address.bind` stores both addresses.
    assert fields(BLOCK)["out"][1] == fields(BLOCK)["send"][1] + 8


@pytest.mark.parametrize("name", ["Block", "State", "Trace", "CallTimes"])
def test_python_and_compiled_code_see_the_same_fields(name):
    structure = getattr(control_block, name)
    dtype = {"CallTimes": control_block.CALL_TIMES}.get(name) or getattr(
        control_block, name.upper()
    )
    assert fields(np.dtype(structure)) == fields(dtype)
    with pytest.raises(AttributeError):
        structure().no_such_field = 1
