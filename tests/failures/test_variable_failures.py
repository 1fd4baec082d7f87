"""Tasks that die while others use their variables or run functions there."""

import victims

from launcher import lines

PRELUDE = """
    service = strategies.rpc.Service(comm)

    def open_variable(value, name="v", task=0):
        return strategies.variables.shared_variable(
            value, service=service, shared_name=name, task=task, optimizer=strategies.SGD(1.0)
        )
"""


END = """
    service.close()
    leave()
"""


def start(tmp_path, size, text):
    return victims.start(tmp_path, size, PRELUDE, text, END)


def test_a_killed_task_is_an_error_for_all_that_use_it_at_once(tmp_path):
    text = """
        v, late = open_variable(np.zeros(100_000)), open_variable(None, "late")
        other = open_variable(np.zeros(2), "other", task=1)
        comm.barrier()
        if comm.rank == 0:
            def waiting():
                found = service.here(strategies.variables.request_handler.KIND, late.address)
                return len(found._waiting) == 4
            until(waiting)
            die()
        blocked = []
        calls = [late.read, lambda: strategies.variables.read_all([other, late]),
                 lambda: strategies.rpc.Task(service, 0).run("time:sleep", 60)]
        threads = [threading.Thread(target=lambda c=c: blocked.append(timed(c))) for c in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        began = time.monotonic()
        blocked.append(timed(v.read))
        blocked.append(timed(lambda: v.apply_gradients(np.ones(100_000))))
        blocked.append(timed(lambda: open_variable(None, "new")))
        assert time.monotonic() - began < 20
        for error, _ in blocked:
            assert error.startswith("UnavailableError: ") and "task 0 died" in error, error
        assert max(seconds for _, seconds in blocked) < 20, blocked
        other.apply_gradients(-np.ones(2))
        until(lambda: other.read().version == 2)
        say(other.read().value.tolist(), strategies.rpc.Task(service, 1).run("math:sqrt", 4))
    """
    result = start(tmp_path, 3, text)
    assert lines(result) == ["rank 1: [2.0, 2.0] 2.0", "rank 2: [2.0, 2.0] 2.0"], result


def test_a_killed_client_leaves_whole_values_and_others_go_on(tmp_path):
    text = """
        v = open_variable(np.zeros(500_000) if comm.rank == 0 else None)
        comm.barrier()
        if comm.rank == 2:
            threading.Timer(0.3, die).start()
            while True:
                v.apply_gradients(-np.ones(500_000))
        mine = 0
        if comm.rank == 1:
            while 2 not in service._exchange._lost or mine < 20:
                v.apply_gradients(-np.ones(500_000))
                mine += 1
            value, version = v.read()
            assert set(value) == {float(version)}, (set(value), version)
            assert version >= mine
            say("whole")
    """
    result = start(tmp_path, 3, text)
    assert lines(result) == ["rank 1: whole"], result


def test_a_lock_of_a_killed_task_is_free_and_one_on_a_killed_task_is_lost_to_all(tmp_path):
    text = """
        here, there = (strategies.rpc.MutexLock(service, "m", task=task) for task in (0, 3))
        if comm.rank == 3:
            here.acquire()
        if comm.rank == 2:
            there.acquire()
        comm.barrier()
        if comm.rank == 3:
            die()
        here.acquire(timeout=20)                       # of the dead one, by all others in turn
        here.release()
        found = []
        waiting = threading.Thread(target=lambda: found.append(timed(there.acquire)[0]))
        waiting.start()
        waiting.join()                                 # by now this task has heard of it
        found += [timed(there.release if comm.rank == 2 else there.acquire)[0]]
        for error in found:
            assert error.startswith("UnavailableError: "), found
            assert error.endswith(": task 3 died (object: 'm' on task 3)"), found
        say(there.is_held)
        time.sleep(0.5)
    """
    result = start(tmp_path, 4, text)
    assert lines(result) == [f"rank {rank}: False" for rank in range(3)], result


def test_accumulators_of_and_on_a_killed_task(tmp_path):
    text = """
        here, there = (
            strategies.accumulators.shared_accumulator(
                strategies.accumulators.ConditionalAccumulator, np.float32, (),
                service=service, shared_name="a", task=task,
            )
            for task in (0, 2)
        )
        comm.barrier()
        if comm.rank == 2:
            here.apply_grad(5.0)
            threading.Thread(target=lambda: here.take_grad(2), daemon=True).start()
            until(lambda: here.num_accumulated() == 1)
            die()
        error, _ = timed(lambda: there.take_grad(1))
        assert error == "UnavailableError: take: task 2 died (object: 'a' on task 2)", error
        if comm.rank == 1:                             # whom the dead one was before in the line
            here.apply_grad(7.0)
            say(here.take_grad(2, timeout=20))
            error, _ = timed(lambda: here.take_grad(1, timeout=0.1))
            assert "0 of 1 gradients have arrived" in error, error
        time.sleep(1)
    """
    result = start(tmp_path, 3, text)
    assert lines(result) == ["rank 1: 6.0"], result


def test_who_sets_a_value_is_killed_before_it_does(tmp_path):
    text = """
        v, asked = open_variable(None), open_variable(np.zeros(2), "asked", task=1)
        comm.barrier()
        if comm.rank == 2:
            die()
        error, _ = timed(lambda: v.read(timeout=0.5))
        assert error.startswith("DeadlineExceededError: read: not "), error
        assert error.endswith("; no initial value yet of v"), error
        if comm.rank == 0:
            asked.apply_gradients(np.zeros(2))
        else:
            until(lambda: asked.read().version == 1)  # rank 0 has not found a value either
            open_variable(np.ones(2))
        say(v.read(timeout=20).value.tolist())
        if comm.rank == 1:
            v.apply_gradients(np.zeros(2))
        else:
            until(lambda: v.read().version == 1)  # rank 1 has read it: task 0 may leave
    """
    result = start(tmp_path, 3, text)
    assert lines(result) == ["rank 0: [1.0, 1.0]", "rank 1: [1.0, 1.0]"], result
