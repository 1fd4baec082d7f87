"""An experiment: each task does the part of its job."""

import numpy as np
from calls import folder_of

import strategies
from strategies.checkpoint import Saver, checkpoint
from strategies.experiment import train_and_evaluate
from strategies.session import TrainingSession, hooks, read_metrics


def spec_of(size):
    """A worker; an evaluator beside it; a ps; a second worker."""
    evaluators, ps = int(size > 1), int(size > 2)
    jobs = {"evaluator": evaluators, "ps": ps, "worker": size - evaluators - ps}
    ranks = iter(range(size))
    return {job: [f"rank:{next(ranks)}" for _ in range(n)] for job, n in jobs.items() if n}


def test_every_checkpoint_is_scored_once(comm):
    folder = folder_of(comm)

    def build(tasks):
        if not tasks.cluster.ranks_of("ps"):
            return strategies.Variable(np.zeros(2), name="w"), None
        strategy = strategies.ParameterServerStrategy(tasks.server, strategies.SGD(1.0))
        return strategy.variable(np.zeros(2), name="w"), strategy

    def train(tasks, built):
        variable, strategy = built
        manager = strategies.CheckpointManager(folder, keep=50)

        def step():
            if strategy is None:
                variable.assign(variable.value + 1)
            else:
                strategy.apply_gradients(strategy.optimizer, [(-np.ones(2), variable)])

        with manager, TrainingSession(
            Saver(manager, model=variable if strategy is None else strategy),
            tasks.cluster.workers,
            in_step=False,
            save_steps=2,
            hooks=[hooks.StopAtStep(5), *tasks.hooks],
            preemption=tasks.preemption,
        ) as session:  # fmt: skip
            while not session.should_stop():
                session.run(step)
        return session.step

    def evaluate(built, path):
        assert comm.rank == 0, "the evaluator, or the only one"
        found = checkpoint.restore(path).tensors
        name = "model" if built[1] is None else "model/variable/w"
        return {"w": found[name][0]}

    steps = train_and_evaluate(
        build, train, evaluate, checkpoints=folder, cluster=spec_of(comm.size), comm=comm
    )
    trains = comm.rank >= min(comm.size - 1, 2)
    assert steps == (5 if trains else None)
    scores = read_metrics(f"{folder}/scores.jsonl")
    # The last one is written again when all workers have stopped, and then scored again.
    assert sorted({line["step"] for line in scores}) == [0, 2, 4, 5]
    assert len({line["sequence"] for line in scores}) == len(scores)
    assert scores[0]["w"] == 0
    assert scores[-1]["w"] == 5 * max(1, comm.size - 2)
