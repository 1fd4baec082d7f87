"""Limits that the environment sets, in a process that begins with them."""

import json
import sys

from launcher import run, written

PROGRAM = """
import json, math, threading, time
import numpy as np
import strategies
from strategies.errors import DeadlineExceededError
from strategies.queues import FIFOQueue
from strategies.rpc import Service, Task
import collectives as cc

found = {}
queue = FIFOQueue(1, np.int64, [()])
began = time.monotonic()
try:
    queue.dequeue()
except DeadlineExceededError as error:
    found["queue"] = str(error)
found["waited"] = time.monotonic() - began
try:
    queue.dequeue(timeout=0.001)
except DeadlineExceededError as error:
    found["call"] = str(error)
threading.Timer(0.5, queue.enqueue, (3,)).start()
found["any time"] = int(queue.dequeue(timeout=math.inf))

# The thread that fills a queue waits as long as it takes.
filled, runner = strategies.input.range_input_producer(4, shuffle=False, num_epochs=1, capacity=1)
coord = strategies.input.Coordinator()
threads = runner.create_threads(coord, daemon=True, start=True)
time.sleep(0.5)
found["filled"] = filled.dequeue_many(4, timeout=20).tolist()
coord.request_stop()
coord.join(threads)

with Service(cc.init()) as service:
    late = strategies.variables.shared_variable(None, service=service, shared_name="v")
    try:
        late.read()
    except DeadlineExceededError as error:
        found["variable"] = str(error)
    most, now, lock, two = [0], [0], threading.Lock(), threading.Barrier(2)
    def work():
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        two.wait(20)
        time.sleep(0.05)  # in which a third thread would come
        with lock:
            now[0] -= 1
    futures = [Task(service, 0).submit(work) for _ in range(6)]
    for future in futures:
        future.result(20)
    found["at once"] = most[0]
print(json.dumps(found))
"""


def test_waits_and_threads_have_the_limits_of_the_environment(tmp_path):
    program = written(tmp_path, PROGRAM)
    result = run(
        [sys.executable, program], timeout=60, UNISONO_WAIT_LIMIT="0.2", UNISONO_CALL_THREADS="2"
    ).checked()
    found = json.loads(result.stdout)
    assert found["queue"].startswith("dequeue: not finished after 0.2 s"), found
    assert found["waited"] >= 0.2
    assert found["call"].startswith("dequeue: not finished after 0.001 s")
    assert found["any time"] == 3
    assert found["filled"] == [0, 1, 2, 3]
    assert "not finished after 0.2 s; no initial value yet of" in found["variable"]
    assert found["at once"] == 2
