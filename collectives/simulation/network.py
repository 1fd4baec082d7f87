"""Simulated network: connections that share the bandwidth of their nodes.

A *connection* takes the messages of one rank to another one, in order, one at a time. All
connections that have something under way on a *line* get equal shares of its rate; one of several
lines has the least of its shares. What it leaves of the others is given to nobody: with that a
change would spread over all lines of the cluster, and in schedules where all ranks do the same
nothing is left.

Cores that ranks share are a line, too: the kernel carries bytes there, for the program that sends
and for the one that receives, so that a message between nodes of one host uses it twice.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from collectives.core.links import Machine
from collectives.simulation.clock import EventClock
from collectives.simulation.cluster import SimulatedCluster

__all__ = ["Connection", "NetworkLink", "NetworkModel"]


class NetworkLink:
    """Something that bytes pass, at a rate.

    Attributes:
        beta: seconds for a byte that has it alone.
        users: connections with bytes under way.
        saved: bytes that may pass at once.

    Args:
        beta: as above.
        burst: the most bytes that it saves while it is idle.
    """

    __slots__ = ("_burst", "_idle", "beta", "saved", "users")

    def __init__(self, beta: float, burst: float = 0.0) -> None:
        self.beta = beta
        self.users: list[Connection] = []
        self.saved = burst  # it was idle before
        self._burst = burst
        self._idle = 0.0  # since when

    def enter(self, connection: Connection, now: float) -> None:
        """Let a connection use it."""
        if self._burst and not self.users:
            self.saved = min(self._burst, self.saved + (now - self._idle) / self.beta)
        self.users.append(connection)

    def leave(self, connection: Connection, now: float) -> None:
        """Let it go."""
        self.users.remove(connection)
        self._idle = now


class Connection:
    """Messages from one rank to another, on their way over some lines one after the other.

    Args:
        clock: whose time it takes.
        lines: that each byte passes, all at the same time.
        latency: seconds that a message is on its way, besides.
        arrive: called for each message, in order, when its last byte has been sent, with the time
            when it will be there.
    """

    __slots__ = ("_arrive", "_beta", "_clock", "_due", "_left", "_lines", "_queue", "_since",
                 "latency")  # fmt: skip

    def __init__(
        self,
        clock: EventClock,
        lines: tuple[NetworkLink, ...],
        latency: float,
        arrive: Callable[[float], None],
    ) -> None:
        self._clock = clock
        self._lines = lines
        self.latency = latency
        self._arrive = arrive
        self._queue: deque[tuple[float, int]] = deque()  # when it may begin, bytes
        self._left = 0.0  # bytes of the first, at `_since`
        self._since = 0.0
        self._beta = 0.0  # seconds for a byte, at present
        self._due = 0  # counts up when what has been scheduled holds no more

    def send(self, ready: float, nbytes: int) -> None:
        """Take a message, which begins its way at `ready` or when those before it are through."""
        self._queue.append((ready, nbytes))
        if len(self._queue) == 1:
            self._clock.at(ready, self._begin, None)

    def _begin(self, _: None) -> None:
        """Let the first message enter the lines."""
        now = self._clock.now
        self._beta = 0.0  # not known yet
        for line in self._lines:
            line.enter(self, now)
        self._since, self._left = now, self._beyond_bursts()
        for line in self._lines:
            if len(line.users) > 1:
                for other in line.users:
                    if other is not self:
                        other._share()
        self._share()

    def _beyond_bursts(self) -> float:
        """Return the bytes of the first message that do not pass at once."""
        nbytes = self._queue[0][1]
        if not self._lines[0].saved:  # of most clusters always
            return nbytes
        at_once = min(nbytes, *(line.saved for line in self._lines))
        for line in self._lines:
            line.saved -= at_once
        return nbytes - at_once

    def _share(self) -> None:
        """Find out how long a byte takes now, and when the last one of the message is through."""
        beta = 0.0
        for line in self._lines:
            cost = line.beta * len(line.users)
            if cost > beta:
                beta = cost
        if beta == self._beta:
            return
        now = self._clock.now
        if self._beta:
            self._left -= (now - self._since) / self._beta
            self._since = now
        self._beta = beta
        self._due += 1
        self._clock.at(now + max(self._left, 0.0) * beta, self._through, self._due)

    def _through(self, due: int) -> None:
        """Hand the first message over, unless its way has become longer or shorter meanwhile."""
        if due != self._due:
            return
        clock = self._clock
        queue = self._queue
        queue.popleft()
        clock.delivered += 1
        if queue and queue[0][0] <= clock.now:
            self._since, self._left = clock.now, self._beyond_bursts()
            self._due += 1
            clock.at(clock.now + self._left * self._beta, self._through, self._due)
        else:
            self._due += 1
            for line in self._lines:
                line.leave(self, clock.now)
                for other in line.users:
                    if other is not self:
                        other._share()
            if queue:
                clock.at(queue[0][0], self._begin, None)
        self._arrive(clock.now + self.latency)


class NetworkModel:
    """The lines of a cluster, and the programs' part in a message.

    Args:
        clock: of the ranks.
        machine: what messages cost.

    Attributes:
        between, inside: seconds that a message between nodes, or inside one, costs each of its two
            programs.
        nodes: the node of every rank.
    """

    def __init__(self, clock: EventClock, machine: Machine) -> None:
        cluster: SimulatedCluster = clock.cluster
        node, network = machine.node, machine.network
        self.inside, self.between = machine.inside, machine.between
        self.nodes = cluster.nodes()
        self._clock = clock
        self._latency = network.alpha - 2 * self.between
        self._node_beta = node.beta
        self._copying = cluster.copying
        nodes = range(cluster.num_nodes)
        self._out = [NetworkLink(network.beta, cluster.burst) for _ in nodes]
        self._in = [NetworkLink(network.beta, cluster.burst) for _ in nodes]
        self._below = cluster.nodes_per_switch or cluster.num_nodes
        switches = -(-cluster.num_nodes // self._below)
        self._cores = self._of_hosts(cluster)
        up = network.beta * cluster.oversubscription / self._below
        self._up = [NetworkLink(up) for _ in range(switches)]
        self._down = [NetworkLink(up) for _ in range(switches)]

    def _of_hosts(self, cluster: SimulatedCluster) -> list[tuple[NetworkLink, ...]]:
        """Return the cores of each node's host as a line, where ranks share them and bytes cost.

        A burst passes at once: what it takes of the cores the programs wait for (`transport`).
        """
        shared = {
            node // cluster.nodes_per_host: rank.shares
            for node, rank in zip(self.nodes, self._clock.ranks, strict=True)
        }
        cores = [
            (NetworkLink(cluster.carrying, math.inf),) if shared[host] and cluster.carrying else ()
            for host in sorted(shared)
        ]
        return [cores[node // cluster.nodes_per_host] for node in range(cluster.num_nodes)]

    def cost(self, one: int, other: int) -> float:
        """Return the seconds that a message between two ranks costs each program."""
        return self.inside if self.nodes[one] == self.nodes[other] else self.between

    def copying(self, one: int, other: int) -> float:
        """Return the seconds that a byte between two ranks costs each program."""
        return self._copying if self.nodes[one] != self.nodes[other] else 0.0

    def connect(self, source: int, dest: int, arrive: Callable[[float], None]) -> Connection:
        """Return a connection from one rank to another; `arrive` as there."""
        one, other = self.nodes[source], self.nodes[dest]
        if one == other:  # memory, which each pair has for itself
            return Connection(self._clock, (NetworkLink(self._node_beta),), 0.0, arrive)
        lines = (self._out[one], self._in[other], *self._cores[one], *self._cores[other])
        above, below = one // self._below, other // self._below
        if above != below:
            lines = (*lines, self._up[above], self._down[below])
        return Connection(self._clock, lines, self._latency, arrive)
