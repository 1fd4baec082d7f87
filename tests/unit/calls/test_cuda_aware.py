"""One answer on all ranks: whether messages are made of device memory."""

from __future__ import annotations

import itertools

import pytest

import inprocess
from collectives.calls import shared_settings
from collectives.communicator import group_of
from collectives.core.settings import Settings


def answers(wishes, monkeypatch, says=False):
    monkeypatch.setattr(shared_settings, "library_takes_device_memory", lambda: says)

    def ask(comm):
        wish = Settings(timeout=10, cuda_aware=wishes[comm.rank])
        return shared_settings.negotiate(wish, group_of(comm).transport).cuda_aware

    return inprocess.run_ranks(len(wishes), ask)


@pytest.mark.parametrize("wishes", list(itertools.product(["on", "off"], repeat=3)))
def test_all_ranks_make_messages_of_device_memory_or_none(monkeypatch, caplog, wishes):
    expected = "on" if set(wishes) == {"on"} else "off"
    assert answers(wishes, monkeypatch) == [expected] * 3
    # Who would have done so is told why it does not.
    assert caplog.text.count("not take device memory on all ranks") == (
        wishes.count("on") if expected == "off" else 0
    )


@pytest.mark.parametrize("says", [True, False])
def test_the_library_is_asked_where_the_user_has_not_said(monkeypatch, says):
    expected = "on" if says else "off"
    assert answers(["auto"], monkeypatch, says) == [expected]
    assert answers(["auto", "auto", "on"], monkeypatch, says) == [expected] * 3
    assert answers(["off", "auto"], monkeypatch, says) == ["off"] * 2
