"""Where calls come from: through frames of ours, and for a thread that works for another one."""

import sys
import threading

from collectives.tracing import call_sites
from collectives.tracing.recorder import Recorder

LIMIT = 20


def test_the_call_site_is_the_first_frame_outside_of_our_packages():
    inner = {"origin": call_sites.current_origin, "__name__": "collectives.somewhere"}
    exec("def inside():\n return origin()\n", inner)
    outer = {**inner, "__name__": "strategies.somewhere"}
    exec("def outside():\n return inside()\n", outer)
    site, entry = outer["outside"]()
    line = sys._getframe().f_lineno - 1
    assert (site.file, site.line) == (__file__, line)
    assert str(site) == f"test_call_sites.py:{line}"
    assert entry == "outside"
    assert inner["inside"]().entry == ""


def test_a_record_names_the_line_of_the_program_that_calls_through_pytorch():
    ours = {"__name__": "strategies.torch.backend", "recorder": Recorder("world", 0, 1)}
    exec("def hook():\n return recorder.begin(1, 'allreduce').site\n", ours)
    torch = {"__name__": "torch.autograd.graph", "hook": ours["hook"]}
    exec("def backward():\n return hook()\n", torch)
    site = torch["backward"]()
    assert (site.file, site.line) == (__file__, sys._getframe().f_lineno - 1)


def test_a_thread_may_record_for_another_one():
    origin = call_sites.current_origin()
    mine = Recorder("world", 0, 1)
    seen = []

    def body():
        with call_sites.calls_from(origin):
            seen.append(mine.begin(1, "barrier").site)
            with call_sites.calls_from(call_sites.CallOrigin(origin.site, "inner")):
                seen.append(call_sites.current_origin().entry)
                other = threading.Thread(
                    target=lambda: seen.append(call_sites.current_origin().site)
                )
                other.start()
                other.join(LIMIT)
            seen.append(call_sites.current_origin().entry)
        seen.append(mine.begin(2, "barrier").site)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(LIMIT)
    site, inner, elsewhere, outer, afterwards = seen
    assert (site, inner, outer) == (origin.site, "inner", origin.entry)
    assert afterwards != origin.site != elsewhere


def test_another_thread_is_in_a_call_if_a_frame_of_ours_holds_it():
    ours = {"__name__": "collectives.somewhere"}
    exec("def run(plan, wait):\n wait()\n", ours)

    def program(plan, wait):
        wait()

    plan = object()
    for function, expected in ((ours["run"], "other"), (program, None)):
        begun, stop = threading.Event(), threading.Event()

        def wait(begun=begun, stop=stop):
            begun.set()
            stop.wait(LIMIT)

        thread = threading.Thread(target=function, args=(plan, wait), name="other")
        thread.start()
        assert begun.wait(LIMIT)
        found = call_sites.other_thread_in(plan)
        stop.set()
        thread.join(LIMIT)
        assert found == expected
    ours["run"](plan, lambda: None)
    assert call_sites.other_thread_in(plan) is None
