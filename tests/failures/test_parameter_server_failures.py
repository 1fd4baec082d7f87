"""Workers, ps tasks and coordinators that die or stop, each test in an mpirun of its own."""

import pytest
import victims

from launcher import lines
from pairwise import also

PRELUDE = """
    from strategies.cluster.cluster import Cluster
    from strategies.rpc.server import Server
    from strategies.cluster.spec import ClusterSpec
    from strategies.parameter_server import ClusterCoordinator, ParameterServerStrategy

    def die():
        open("dies", "w").close()
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    def until_one_dies():
        until(lambda: os.path.exists("dies"))

    def start(ps=1, **options):
        global server, strategy, w
        server = Server(Cluster(ClusterSpec.from_ranks(comm.size, ps=ps), comm))
        strategy = ParameterServerStrategy(server, strategies.SGD(1.0), **options)
        w = strategy.variable(np.zeros(4), name="w")
        v = strategy.variable(np.zeros(4), name="v")

    def push():
        pairs = [(np.ones(4), variable) for variable in strategy.variables.values()]
        strategy.apply_gradients(strategy.optimizer, pairs)

    def outcome(call):
        began = time.monotonic()
        try:
            call()
        except OpError as error:
            assert time.monotonic() - began < 20, "too late"
            return f"{type(error).__name__}: {error}"
        return "fine"
"""


END = """
    server.close()
    leave()
"""


def start(tmp_path, size, *parts):
    return victims.start(tmp_path, size, PRELUDE, *parts, cwd=tmp_path)


@pytest.mark.parametrize("synchronous", [False, True])
def test_the_others_go_on_without_a_killed_worker(tmp_path, synchronous):
    text = f"""
        start(synchronous={synchronous})
        if comm.rank == 0:
            say(outcome(server.join))
        else:
            for step in range(20):
                if comm.rank == 3 and step == 5:
                    die()
                push()
            strategy.leave()
            say("done", strategy.reports()[0].records[comm.rank].applied)
    """
    result = start(tmp_path, 4, text, END)
    assert lines(result) == ["rank 0: fine", "rank 1: done 20", "rank 2: done 20"], result


@pytest.mark.parametrize("killed", [1, 3])
def test_a_session_of_the_workers_ends_without_a_killed_one(tmp_path, killed):
    text = f"""
        from strategies.checkpoint import Saver
        from strategies.session import TrainingSession, hooks
        start()
        if comm.rank == 0:
            say(outcome(server.join))
        else:
            checkpoints = strategies.CheckpointManager("{tmp_path / "run"}")
            saver = Saver(checkpoints, model=strategy)
            with checkpoints, TrainingSession(
                saver, server.cluster.workers, in_step=False, hooks=[hooks.StopAtStep(20)]
            ) as session:
                while not session.should_stop():
                    if comm.rank == {killed} and session.step == 5:
                        die()
                    session.run(push)
                strategy.leave()
            names = sorted(os.listdir("{tmp_path / "run"}")) if session.is_chief else ""
            say("ended", session.step, *names)
    """
    result = start(tmp_path, 4, text, END)
    alive = sorted({1, 2, 3} - {killed})
    chief, other = (f"rank {rank}: ended 20" for rank in alive)
    found = lines(result)
    assert found[0] == "rank 0: fine", result
    assert found[2].strip() == other, result
    assert found[1].startswith(f"{chief} "), result
    assert "step" in found[1], result


def test_a_worker_that_dies_while_others_wait_for_it_lets_them_go(tmp_path):
    text = """
        start(synchronous=True)
        if comm.rank == 0:
            server.join()
        elif comm.rank == 1:
            def still_waits():
                say("still waits", w.value[0])
                open("waits", "w").close()

            threading.Timer(1.0, still_waits).start()
            say(outcome(push), w.value[0])
        else:
            until(lambda: os.path.exists("waits"))
            die()
    """
    result = start(tmp_path, 3, text, END)
    assert lines(result) == ["rank 1: fine -1.0", "rank 1: still waits 0.0"], result


@pytest.mark.parametrize("synchronous", [False, True])
def test_a_killed_ps_is_a_clear_error_everywhere(tmp_path, synchronous):
    text = f"""
        start(ps=2, synchronous={synchronous}, timeout=20)
        if comm.rank == 1:
            threading.Timer(1.0, die).start()
            server.join()
        elif comm.rank == 0:
            say(outcome(server.join).split("(")[0])
        else:
            found = "fine"
            until = time.monotonic() + 20
            while found == "fine" and time.monotonic() < until:
                found = outcome(push)
            say(found.replace(" in container ''", ""))
            again = outcome(push)
            assert "task 1 died" in again, again
            assert "task 1 died" in outcome(strategy.pull)
    """
    result = start(tmp_path, 5, text, END)
    found = lines(result)
    assert len(found) == 4, result
    assert found[0] == "rank 0: fine", result
    for line in found[1:]:
        assert "UnavailableError" in line, result
        assert "task 1 died" in line, result
        assert "start again from a checkpoint" in line, result


@pytest.mark.parametrize(("synchronous", "total"), [also(False, -20.0), (True, -10.0)])
def test_a_worker_that_stops_for_5_seconds_does_no_harm(tmp_path, synchronous, total):
    text = f"""
        import subprocess
        start(synchronous={synchronous})
        if comm.rank == 0:
            server.join()
        else:
            for step in range(10):
                if comm.rank == 2 and step == 5:
                    subprocess.Popen(f"sleep 5; kill -CONT {{os.getpid()}}", shell=True)
                    os.kill(os.getpid(), signal.SIGSTOP)
                push()
            server.cluster.workers.barrier()
            strategy.pull()
            say(w.value[0], sum(r.applied for r in strategy.reports()[0].records.values()))
    """
    result = start(tmp_path, 3, text, END)
    assert lines(result) == [f"rank 1: {total} 20", f"rank 2: {total} 20"], result


def test_training_goes_on_from_a_checkpoint_after_a_ps_was_killed(tmp_path):
    program = f"""
        start(ps=2, synchronous=True, timeout=20)
        if server.cluster.job == "ps":
            server.join()
            leave()
        workers = server.cluster.workers
        checkpoints = strategies.CheckpointManager({str(tmp_path / "run")!r})
        found = checkpoints.restore_or_none() if strategy.is_chief else None
        if found is not None:
            strategy.load_state_dict(found.tensors)
        step = workers.broadcast_object(found.step if found else 0)
        say("begins at", step)
        strategy.pull()
        task = strategies.rpc.Task(server.service, 1)
        try:
            first = step == 0
            while first or step < 20:  # at first until the ps is gone
                push()
                step += 1
                if strategy.is_chief and step == 10:
                    checkpoints.save(strategy.state_dict(), step=step)
                if strategy.is_chief and step == 15 and first:
                    task.submit("__main__:die")
            say("ends with", w.value[0], strategy.reports()[1].version)
            server.close()
        except UnavailableError as error:
            assert "start again from a checkpoint" in str(error), error
            say("stops")
        leave()
    """
    first, second = start(tmp_path, 4, program), start(tmp_path, 4, program)
    assert lines(first) == [
        f"rank {rank}: {what}" for rank in (2, 3) for what in ("begins at 0", "stops")
    ], first
    assert lines(second) == [
        f"rank {rank}: {what}" for rank in (2, 3) for what in ("begins at 10", "ends with -20.0 20")
    ], second


SAVES = """
    from strategies.checkpoint import Saver, checkpoint, manifest

    def ask_or_die(operation, sent=0):
        # Dies instead of a request, of which only some ps tasks get theirs.
        ask = strategy.service.ask

        def checked(questions):
            if questions and questions[0].operation == operation:
                ask(questions[:sent]).answers()
                die()
            return ask(questions)

        strategy.service.ask = checked

    def saved():
        return sorted(name for name in os.listdir("run") if name.startswith("step"))

    start(ps=2)
    checkpoints = strategies.CheckpointManager("run", sharded=True, background=True)
    saver = Saver(checkpoints, model=strategy)
    if server.cluster.job == "worker" and not strategy.is_chief:
        push()
"""


def test_a_ps_that_dies_during_a_save_is_an_error_that_names_it(tmp_path):
    text = """
        if comm.rank == 1:
            checkpoint.write_shard = lambda *arguments: die()
        if server.cluster.job == "ps":
            outcome(server.join)
        elif strategy.is_chief:
            saver.save(1)
            error = outcome(checkpoints.wait)
            say(" | ".join([error, str(os.listdir("run")), outcome(push)]))
    """
    result = start(tmp_path, 4, SAVES, text, END)
    (found,) = lines(result)
    error, listing, after = found.split(" | ")
    assert "UnavailableError: save: snapshot_write: task 1 died" in error, result
    assert error.endswith("(/job:ps/task:1)"), result
    assert listing == "['.lock']", result
    assert "start again from a checkpoint" in after, result


# What the chief does when it dies: its parts are written, or all ps tasks are held.
CHIEF_DIES = ["manifest.Manifest.encode = lambda plan: die()", "ask_or_die('snapshot_take')"]


@pytest.mark.parametrize("dies", CHIEF_DIES)
def test_training_goes_on_without_a_chief_that_died_during_a_save(tmp_path, dies):
    text = f"""
        if server.cluster.job == "ps":
            say(outcome(server.join))
        elif strategy.is_chief:
            if saver.restore() is None:
                push()
                saver.save(1)
                checkpoints.wait()
                {dies}
                saver.save(2)
                checkpoints.wait()
            say("restored", saved(), strategy.state_dict()["variable/w"][0] <= -1)
        else:
            if not os.path.exists("run/step-000001"):
                until_one_dies()
            for _ in range(20):
                push()
            say("done")
    """
    first, second = start(tmp_path, 4, SAVES, text, END), start(tmp_path, 4, SAVES, text, END)
    assert lines(first) == ["rank 0: fine", "rank 1: fine", "rank 3: done"], first
    assert "rank 2: restored ['step-000001'] True" in lines(second), second


def test_a_ps_that_dies_during_a_restore_is_an_error_that_names_it(tmp_path):
    text = """
        if comm.rank == 1:
            checkpoint.fill = lambda *arguments: die()
        if server.cluster.job == "ps":
            outcome(server.join)
        elif strategy.is_chief:
            saver.save(1)
            checkpoints.wait()
            say(" | ".join([outcome(saver.restore), outcome(push)]))
    """
    result = start(tmp_path, 4, SAVES, text, END)
    (found,) = lines(result)
    error, after = found.split(" | ")
    assert "UnavailableError: restore: restore_read: task 1 died" in error, result
    assert error.endswith("(/job:ps/task:1)"), result
    assert "start again from a checkpoint" in after, result


# When the chief dies: one ps has read its parts; all have, and none has loaded them.
@pytest.mark.parametrize(("operation", "sent"), [("restore_read", 1), ("load", 0)])
def test_training_goes_on_without_a_chief_that_died_during_a_restore(tmp_path, operation, sent):
    text = f"""
        if server.cluster.job == "ps":
            say(outcome(server.join))
        elif strategy.is_chief:
            first = saver.checkpoints.latest() is None
            if first:
                for _ in range(50):
                    push()
                saver.save(1)
                checkpoints.wait()
                ask_or_die({operation!r}, sent={sent})
            say("restored", saver.restore(), strategy.state_dict()["variable/w"][0] <= -50)
        else:
            if not os.path.exists("run/step-000001"):
                until_one_dies()
            for _ in range(20):
                push()
            say("done")
    """
    first, second = start(tmp_path, 4, SAVES, text, END), start(tmp_path, 4, SAVES, text, END)
    assert lines(first) == ["rank 0: fine", "rank 1: fine", "rank 3: done"], first
    assert "rank 2: restored 1 True" in lines(second), second


def test_a_worker_that_died_while_it_pushed_does_not_delay_a_save(tmp_path):
    text = """
        if server.cluster.job == "ps":
            server.join()
        elif strategy.is_chief:
            until_one_dies()
            saver.save(1)
            checkpoints.wait()
            say(saved(), *checkpoint.restore("run").tensors["model/updates"])
        elif comm.rank == 3:
            ask_or_die("push", sent=1)
            push()
        else:
            push()
    """
    result = start(tmp_path, 5, SAVES, text, END)
    (found,) = lines(result)
    assert found.startswith("rank 2: ['step-000001']"), result


def test_training_goes_on_without_a_killed_chief(tmp_path):
    # Nobody needs it but a warm-up, which it ends.
    text = """
        start(synchronous=True, warmup_steps=1000)
        if comm.rank == 0:
            say(outcome(server.join))
        elif comm.rank == 1:
            for _ in range(5):
                push()
            die()
        else:
            for _ in range(5):
                push()
            say("done", w.value[0])
    """
    result = start(tmp_path, 3, text, END)
    assert lines(result) == ["rank 0: fine", "rank 2: done -9.0"], result


CALLS = """
    def step(rank_that_dies, number):
        if number >= 5 and comm.rank == rank_that_dies:
            die()
        if number >= 5 and rank_that_dies > 0:
            until_one_dies()  # otherwise this worker might do all the work
        push()
        return number

    start()
    with ClusterCoordinator(strategy) as coordinator:
"""


def test_work_of_a_killed_worker_is_given_to_another(tmp_path):
    text = """
        if coordinator.coordinates:
            results = [coordinator.schedule(step, args=(3, n)) for n in range(30)]
            coordinator.join(30)
            say(coordinator.fetch(results) == list(range(30)))
            strategy.pull()
            say("at least once", -w.value[0] >= 30)
        else:
            say(outcome(lambda: coordinator.serve(40)))
    """
    result = start(tmp_path, 4, CALLS + text, END)
    assert lines(result) == [
        "rank 0: fine", "rank 1: True", "rank 1: at least once True", "rank 2: fine"
    ], result  # fmt: skip


def test_no_worker_is_left(tmp_path):
    text = """
        if coordinator.coordinates:
            results = [coordinator.schedule(step, args=(2, n)) for n in range(10)]
            say(outcome(lambda: coordinator.join(30)))
            say(outcome(lambda: coordinator.schedule(step, args=(2, 0))))
        else:
            coordinator.serve(40)
    """
    result = start(tmp_path, 3, CALLS + text, END)
    found = lines(result)
    assert len(found) == 2, result
    for line in found:
        assert "rank 1: UnavailableError: no worker is left" in line, result
        assert "task 2 died" in line, result


def test_a_killed_ps_is_an_error_of_the_calls(tmp_path):
    text = """
        if coordinator.coordinates:
            found = "fine"
            until = time.monotonic() + 20
            while found == "fine" and time.monotonic() < until:
                coordinator.schedule(step, args=(-1, 0))
                found = outcome(lambda: coordinator.join(20))
            say(found)
        elif comm.rank == 0:
            threading.Timer(1.0, die).start()
            coordinator.serve(40)
        else:
            say(outcome(lambda: coordinator.serve(40)))
    """
    result = start(tmp_path, 4, CALLS + text, END)
    found = lines(result)
    assert len(found) == 3, result
    assert "UnavailableError" in found[0], result
    assert "task 0 died" in found[0], result
    assert found[1:] == ["rank 2: fine", "rank 3: fine"], result


def test_a_killed_coordinator_is_an_error_on_all(tmp_path):
    text = """
        if coordinator.coordinates:
            for n in range(100):
                coordinator.schedule(step, args=(-1, n))
            time.sleep(0.3)
            die()
        try:
            coordinator.serve(40)
        except UnavailableError as error:
            say(error)
    """
    result = start(tmp_path, 4, CALLS + text, END)
    found = lines(result)
    assert [line[:6] for line in found] == ["rank 0", "rank 2", "rank 3"], result
    assert all("serve: the coordinator is lost: task 1 died" in line for line in found), result


SCHEDULED = """
    from strategies.elastic import Preemption

    def call(number):
        if number >= 6:
            die() if comm.rank == 3 else until_one_dies()
        push()
        return number

    sys.modules["program"] = sys.modules["__main__"]
    call.__module__ = "program"
    with Preemption(comm) as preemption:
        start()
        with server:
            with ClusterCoordinator(strategy) as coordinator:
                if coordinator.coordinates:
                    results = [coordinator.schedule(call, (number,)) for number in range(40)]
                    coordinator.join()
                    say(sum(coordinator.fetch(results)))
                    if STOP:
                        preemption.acknowledge()
                else:
                    coordinator.serve()
    say("over")
"""


@pytest.mark.parametrize("stop", [0, 1])
def test_a_job_with_a_coordinator_ends_well_without_a_killed_worker(tmp_path, stop):
    """Its `Preemption`, around all of it, ends with those that live."""
    result = start(tmp_path, 4, SCHEDULED.replace("STOP", str(stop)))
    expected = ["rank 1: 780"] if stop else ["rank 0: over", "rank 1: 780", "rank 1: over"]
    assert [line for line in lines(result) if line != "rank 2: over"] == expected, result
    assert ("rank 2: over" in result.stdout) == (not stop)
    assert result.status == (85 if stop else 0), result
