"""Horovod's names for JAX: arrays come back as what they were, parameters as new ones."""

import numpy as np
import pytest

from requirements import installed

jax = installed("jax")
if jax:
    import strategies.horovod.jax as hvd


def test_arrays_of_jax(comm):
    made = hvd.HorovodContext(comm)
    ranks = made.world
    x = jax.numpy.arange(4, dtype="float32") + comm.rank
    mean = hvd.allreduce(x, name="x", process_set=ranks)
    assert isinstance(mean, jax.Array)
    np.testing.assert_allclose(mean, np.arange(4) + (comm.size - 1) / 2, rtol=1e-6)
    whole = hvd.allreduce(jax.numpy.full(2, 3 + comm.rank), process_set=ranks)
    assert isinstance(whole, jax.Array)
    assert whole.dtype == jax.numpy.int32
    assert whole.tolist() == [int(3 + (comm.size - 1) / 2)] * 2
    half = hvd.allreduce(x, compression=hvd.Compression.bf16, process_set=ranks)
    assert half.dtype == x.dtype
    combined = hvd.allreduce(half.astype("bfloat16"), op=hvd.Adasum, process_set=ranks)
    assert combined.dtype == "bfloat16"
    np.testing.assert_array_equal(combined.astype("float32"), half.astype("bfloat16"))
    handle = hvd.allgather_async(x[: comm.rank], process_set=ranks)
    assert len(hvd.synchronize(handle)) == sum(min(r, 4) for r in range(comm.size))
    tree = {"w": x, "b": [x + 1]}
    root = comm.size - 1
    given = hvd.broadcast_parameters(tree, root_rank=root, process_set=ranks)
    np.testing.assert_array_equal(given["b"][0], np.arange(4) + root + 1)
    assert not hasattr(hvd, "allreduce_")
    with pytest.raises(ValueError, match="no such root"):
        hvd.broadcast_parameters(tree, root_rank=99, process_set=ranks)
    made.close()


def test_a_transformation_of_optax(comm):
    optax = installed("optax")
    made = hvd.HorovodContext(comm)
    averaged = hvd.DistributedOptimizer(optax.sgd(0.5), process_set=made.world)
    parameters = {"w": jax.numpy.zeros(3)}
    state = averaged.init(parameters)
    own = {"w": jax.numpy.full(3, float(comm.rank))}
    updates, _ = averaged.update(own, state, parameters)
    np.testing.assert_allclose(updates["w"], -0.25 * (comm.size - 1), rtol=1e-6)
    made.close()
