"""One machine of three fails while the digits are learnt: what each strategy promises holds."""

import re
import threading

import pytest

from launcher import ROOT
from limits import Limit
from pairwise import also
from requirements import needs

pytestmark = [pytest.mark.netns, pytest.mark.xdist_group("machines")]

RUN_SECONDS = 110.0
OUTAGE_SECONDS = 3  # shorter than all limits

# Runs an example, and lets all ranks of machine m3 come to harm at their 20th batch, or once others
# have had 40. Where ranks do not wait for each other, the others could use up all batches before:
# they pause, for a second each time, because m3 may need their gradients to get a further batch.
HARM = """
import os, platform, runpy, signal, subprocess, sys, time
sys.path.insert(0, os.path.dirname(sys.argv[3]))
from common import digits
what, folder = sys.argv[1:3]
sys.argv = sys.argv[3:]
gradients, calls, is_whole = digits.Network.gradients, 0, platform.node() == "m3"

def harmed(self, *args):
    global calls, is_whole
    calls += 1
    come, late = f"{folder}/harm", f"{folder}/late"
    if platform.node() != "m3" and calls >= 40 and not os.path.exists(come):
        open(late, "w").close()
        end = time.monotonic() + 1
        while not os.path.exists(come) and time.monotonic() < end:
            time.sleep(0.01)
    if is_whole and (calls == 20 or os.path.exists(late)):
        is_whole = False
        print("harm", flush=True)
        open(come, "w").close()
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "frozen":
            thaw = f"sleep SECONDS; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", thaw], start_new_session=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            open(f"{folder}/unplug", "w").close()
    return gradients(self, *args)

digits.Network.gradients = harmed
runpy.run_path(sys.argv[0], run_name="__main__")
""".replace("SECONDS", str(OUTAGE_SECONDS))

# What is run, and what it says where two of six ranks have died; all learn to 0.96. A worker that
# comes back after hundreds of updates holds a gradient of the beginning: that one is left out.
PROGRAMS = {
    "multi-worker": (
        ("elastic_digits.py", "--epochs", "12", "--checkpoints", "{folder}/saved"),
        "4 of 6 ranks; each row was used 12",
    ),
    "spare replicas": (("spare_replicas.py", "--replicas-to-aggregate", "4"), "worker 5: "),
    "parameter server": (("parameter_server.py", "--coordinator", "--drop", "50"), ""),
}


def pull_the_cable(cluster, folder, over):
    """Unplug m3 for a while, once its ranks are at work."""
    limit = Limit(RUN_SECONDS)
    while not (folder / "unplug").exists() and not over.wait(0.02):
        if not limit.left():
            return
    cluster.connect("m3", False)
    over.wait(OUTAGE_SECONDS)
    cluster.connect("m3", True)


@pytest.mark.parametrize(
    ("strategy", "what"),
    [
        ("multi-worker", "killed"),
        also("multi-worker", "frozen"),
        also("multi-worker", "unplugged"),
        also("spare replicas", "killed"),
        ("spare replicas", "frozen"),
        also("spare replicas", "unplugged"),
        also("parameter server", "killed"),
        also("parameter server", "frozen"),
        ("parameter server", "unplugged"),
    ],
)
def test_the_digits_are_learnt_though_a_machine_fails(three_machines, tmp_path, strategy, what):
    needs("sklearn")
    (example, *given), words = PROGRAMS[strategy]
    arguments = [argument.format(folder=tmp_path) for argument in given]
    program = tmp_path / "harm.py"
    program.write_text(HARM)
    over = threading.Event()
    cable = threading.Thread(target=pull_the_cable, args=(three_machines, tmp_path, over))
    cable.start()
    try:
        result = three_machines.run(
            2, program, what, tmp_path, ROOT / "examples" / example, *arguments,
            timeout=RUN_SECONDS, options=("--with-ft", "ulfm"),
            UNISONO_RECORDER_DIR=str(tmp_path),
        )  # fmt: skip
    finally:
        over.set()
        cable.join()
    assert "harm" in result.stdout, result
    found = re.search(r"accuracy on the held-out digits: .*?([\d.]+)$", result.stdout, re.MULTILINE)
    assert found, result
    assert float(found[1]) >= 0.96, result
    if what == "killed":
        assert words in result.stdout, result
    assert result.status == 0, result
    if what == "unplugged":
        assert (tmp_path / "unplug").exists()
