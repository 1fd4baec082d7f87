"""Exit handlers: every one is called, whatever an earlier one raises."""

import pytest

from collectives.core import process_hooks


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_of_one_handler_prevents_none_of_the_later_ones(caplog, error):
    def fail():
        raise error("of the first")

    called = []
    process_hooks.call_all([fail, lambda: called.append(2), lambda: called.append(3)])
    assert called == [2, 3]
    assert error.__name__ in caplog.text
