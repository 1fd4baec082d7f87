"""Programs for torchrun and for Horovod that run as they are."""

import sys
from textwrap import dedent

import pytest

from launcher import lines, mpirun, run
from requirements import needs

needs("torch")

# As programs begin that train alone where torchrun has not started them.
TORCHRUN = """
import os, socket, sys
import torch, torch.distributed as dist
import beside
if int(os.environ.get("RANK", -1)) == -1:
    sys.exit("trains alone")
if os.environ["RANK"] == "0":
    try:  # as another job on this machine would
        socket.socket().bind(("", int(os.environ["MASTER_PORT"])))
    except OSError:
        pass
    else:
        sys.exit("the port is not reserved")
address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
for backend, named in (("gloo", {"init_method": address}), ("gloo", {}), ("unisono", {})):
    ranks = {"rank": int(os.environ["RANK"]), "world_size": 2} if named else {}
    dist.init_process_group(backend, **named, **ranks)
    dist.all_reduce(total := torch.ones(3))
    assert total.tolist() == [2.0] * 3
    dist.destroy_process_group()
dist.init_process_group("unisono")
assert dist.get_rank() == int(os.environ["RANK"])
assert dist.get_world_size() == int(os.environ["WORLD_SIZE"])
assert dist.get_node_local_rank() == int(os.environ["LOCAL_RANK"])
assert int(os.environ["LOCAL_WORLD_SIZE"]) == 2 and os.environ["GROUP_RANK"] == "0"
total = torch.ones(3)
dist.all_reduce(total)
print(f"rank {dist.get_rank()}: {total.tolist()} {sys.argv[1:]} {__name__}", flush=True)
dist.destroy_process_group()
"""

HOROVOD = """
import sys
import torch
import horovod
import horovod.torch as hvd
import beside
assert horovod.__version__ == "0.28.1"
from horovod.common.process_sets import ProcessSet
from horovod.torch.compression import Compression, Compressor
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.functions import broadcast_parameters
from horovod.torch.mpi_ops import allreduce_async_, synchronize, rank, size

hvd.init()
model = torch.nn.Linear(2, 1, bias=False)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), compression=Compression.none
)
broadcast_parameters(model.state_dict(), root_rank=0)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
total = torch.ones(3)
synchronize(allreduce_async_(total, op=hvd.Sum, name="total"))
assert len(ElasticSampler(5)) == 3 and ProcessSet([0]).ranks == [0]
state = hvd.elastic.TorchState(model, optimizer, epoch=3)
state.epoch = 10 + hvd.rank()
state.restore()  # as it was made
assert state.epoch == 3
state.epoch = 10 + hvd.rank()
with torch.no_grad():
    model.weight.fill_(hvd.rank() + 1)
state.sync()
state.epoch = 0
with torch.no_grad():
    model.weight.zero_()
state.restore()  # as it was synchronized
assert state.epoch == 10 and model.weight.tolist() == [[1, 1]]
try:
    import horovod.tensorflow
except ModuleNotFoundError as error:
    assert "horovod.tensorflow is not available, expected one of horovod, horovod." in str(error)
else:
    sys.exit("horovod.tensorflow is found")
print(f"rank {rank()}: {total.tolist()} {sys.argv[1:]} {__name__}", flush=True)
hvd.shutdown()
"""

PROGRAMS = {"strategies.torch": TORCHRUN, "strategies.horovod": HOROVOD}


@pytest.mark.parametrize("runner", PROGRAMS)
@pytest.mark.parametrize("as_module", [False, True], ids=["file", "module"])
def test_a_program_runs_as_it_is(runner, as_module, tmp_path):
    (tmp_path / "train.py").write_text(dedent(PROGRAMS[runner]))
    (tmp_path / "beside.py").write_text("")
    named = ["-m", "train"] if as_module else [tmp_path / "train.py"]
    cwd = {"cwd": tmp_path} if as_module else {}
    result = mpirun(2, "-m", runner, *named, "--lr", "0.1", timeout=90, **cwd).checked()
    assert lines(result) == [
        f"rank {rank}: [2.0, 2.0, 2.0] ['--lr', '0.1'] __main__" for rank in range(2)
    ]


@pytest.mark.parametrize("runner", PROGRAMS)
@pytest.mark.parametrize(("asked", "status"), [(["--help"], 0), ([], 2), (["-m"], 2)])
def test_without_a_program_it_says_how_it_is_used(runner, asked, status):
    result = run([sys.executable, "-m", runner, *asked], timeout=60)
    assert result.status == status
    assert f"mpirun -np 4 python -m {runner} train.py" in (result.stderr or result.stdout)


@pytest.mark.parametrize("module", ["strategies.torch", "strategies.horovod"])
def test_a_program_that_is_missing_is_named(module):
    result = run([sys.executable, "-m", module, "no-such-program.py"], timeout=60)
    assert result.status == 2
    assert "no such program, expected a file, got 'no-such-program.py'" in result.stderr
    assert "Traceback" not in result.stderr
