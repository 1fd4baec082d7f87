"""Where calls come from: through frames of ours, and for a thread that works for another one."""

from __future__ import annotations

import sys
import threading

from collectives.operations import call_sites
from collectives.operations.recorder import Recorder

LIMIT = 20


def test_the_call_site_is_the_first_frame_outside_of_our_packages():
    inner = {"origin": call_sites.origin, "__name__": "collectives.somewhere"}
    exec("def inside():\n return origin()\n", inner)
    outer = {**inner, "__name__": "strategies.somewhere"}
    exec("def outside():\n return inside()\n", outer)
    site, entry = outer["outside"]()
    line = sys._getframe().f_lineno - 1
    assert (site.file, site.line) == (__file__, line)
    assert str(site) == f"test_call_sites.py:{line}"
    assert entry == "outside"
    assert inner["inside"]().entry == ""


def test_a_thread_may_record_for_another_one():
    site = call_sites.origin().site
    seen = []

    def body():
        call_sites.given.site = site
        seen.append(Recorder("world", 0, 1).begin(1, "barrier").site)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(LIMIT)
    assert seen == [site]
    assert call_sites.given.site is None
