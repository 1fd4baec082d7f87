"""Messages of two ranks that a signal interrupts while they are handed over."""

from types import SimpleNamespace

import pytest

from collectives.p2p.progress_engine import ProgressEngine


class Interrupted:
    """A transfer whose delivery a signal handler interrupts the first time."""

    def __init__(self, interruptions):
        self.interruptions = interruptions
        self.over = False

    def complete(self):
        if self.interruptions:
            self.interruptions -= 1
            raise KeyboardInterrupt
        self.over = True


def test_what_a_signal_kept_from_being_handed_over_comes_with_the_next_move(monkeypatch):
    lane = ProgressEngine(SimpleNamespace(transport=None, unusable=None))
    monkeypatch.setattr(lane, "transport", lambda: SimpleNamespace(poll_mailbox=lambda: None))
    transfers = [Interrupted(0), Interrupted(1), Interrupted(0)]
    lane.matching.requeue(transfers)
    with pytest.raises(KeyboardInterrupt):
        lane.move()
    assert [transfer.over for transfer in transfers] == [True, False, False]
    lane.move()
    assert all(transfer.over for transfer in transfers)
