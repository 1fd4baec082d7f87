"""Front ends of `DistributedOptimizer`, all used alike: arrays, PyTorch, Optax."""

from __future__ import annotations

import numpy as np

import strategies
from requirements import installed
from strategies.optimizers import SGD, Adam, AdamW, Momentum, Nesterov

__all__ = ["Arrays", "Compiled", "Optax", "Torch"]


class Arrays:
    """Variables of float32 arrays, and an optimizer of a kind; without `comm` not distributed."""

    kinds = {
        "sgd": lambda: SGD(0.25), "momentum": lambda: Momentum(0.1, 0.9, nesterov=True),
        "adam": lambda: Adam(0.01), "adamw": lambda: AdamW(0.01),
    }  # fmt: skip
    outer = {None: lambda: None, "nesterov": lambda: Nesterov(0.7)}

    def __init__(self, comm, kind, starts, outer=None, **options):
        self.start(kind, starts)
        if comm is not None:
            self.optimizer = strategies.DistributedOptimizer(
                self.optimizer, comm=comm, outer=self.outer[outer](), **options
            )

    def start(self, kind, starts):
        self.variables = [strategies.Variable(x, name=f"v/{i}") for i, x in enumerate(starts)]
        self.optimizer = self.kinds[kind]()

    @property
    def values(self):
        return [v.value for v in self.variables]

    def assign(self, values):
        for own, x in zip(self.values, values, strict=True):
            own[...] = x

    def step(self, gradients, **told):
        self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True), **told)

    def things(self):
        """Objects for `Saver`."""
        return {"variables": self.variables, "optimizer": self.optimizer}

    def slots(self):
        return list(self.optimizer.state_dict().values())

    def state(self):
        return [x.copy() for x in self.values], self.optimizer.state_dict()

    def load(self, state):
        self.assign(state[0])
        self.optimizer.load_state_dict(state[1])


class Torch(Arrays):
    """Parameters in two groups."""

    def start(self, kind, starts):
        torch = installed("torch")
        makers = {
            "sgd": lambda ps: torch.optim.SGD(ps, 0.25),
            "momentum": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, nesterov=True),
            "adam": lambda ps: torch.optim.Adam(ps, 0.01, amsgrad=True, foreach=True),
            "adamw": lambda ps: torch.optim.AdamW(ps, 0.01, fused=True),
        }
        self.variables = [torch.nn.Parameter(torch.tensor(x)) for x in starts]
        groups = [{"params": self.variables[:2]}, {"params": self.variables[2:]}]
        self.optimizer = makers[kind](groups)

    @property
    def values(self):
        return [v.detach().numpy() for v in self.variables]

    def step(self, gradients, **told):
        torch = installed("torch")
        for variable, x in zip(self.variables, gradients, strict=True):
            variable.grad = None if x is None else torch.tensor(x)
        self.optimizer.step(**told)

    def things(self):
        return {"values": [v.data for v in self.variables], "optimizer": self.optimizer}

    def slots(self):
        return [x for own in self.optimizer.state_dict()["state"].values() for x in own.values()]


class Optax(Arrays):
    compiled = False

    def __init__(self, comm, kind, starts, outer=None, **options):
        jax, optax = installed("jax"), installed("optax")
        self.params = [jax.numpy.asarray(x) for x in starts]
        self.tx = {"sgd": optax.sgd(0.25), "adam": optax.adam(0.01)}[kind]
        if comm is not None:
            whole = {None: None, "nesterov": optax.sgd(0.7, 0.9, nesterov=True)}[outer]
            self.tx = strategies.DistributedOptimizer(self.tx, comm=comm, outer=whole, **options)
        self.inside = self.tx.init(self.params)
        self.update = jax.jit(self.tx.update) if self.compiled else self.tx.update

    @property
    def values(self):
        return [np.array(x) for x in self.params]

    def assign(self, values):
        self.params = [installed("jax").numpy.asarray(x) for x in values]

    def step(self, gradients, **told):
        given = [installed("jax").numpy.asarray(x) for x in gradients]
        updates, self.inside = self.update(given, self.inside, self.params, **told)
        self.params = installed("optax").apply_updates(self.params, updates)

    def state(self):
        return self.params, self.inside

    def load(self, state):
        self.params, self.inside = state


class Compiled(Optax):
    """Inside `jax.jit`."""

    compiled = True
