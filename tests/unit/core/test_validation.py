"""What is checked of numbers and words that users give."""

from typing import Literal

import numpy as np
import pytest

from strategies.core import validation


@pytest.mark.parametrize("value", [0, 3, np.int64(3)])
def test_an_integer_is_returned_as_one_of_python(value):
    checked = validation.integer("example", "count", value, least=0)
    assert checked == value
    assert type(checked) is int


@pytest.mark.parametrize("value", [0, True, 1.0, "1", None])
def test_what_is_not_an_integer_that_is_large_enough_is_refused(value):
    expected = f"^example: bad count, expected an integer >= 1, got {value!r}$"
    with pytest.raises(ValueError, match=expected):
        validation.integer("example", "count", value)


def test_a_word_is_one_of_those_that_are_known():
    words = Literal["file", "data"]
    assert validation.choice("example", "policy", "data", words) == "data"
    expected = "^example: no such policy, expected one of file data, got 'date'$"
    with pytest.raises(ValueError, match=expected):
        validation.choice("example", "policy", "date", words)
