"""Simulated network: connections that share the bandwidth of their nodes.

A *connection* carries the messages from one rank to another, in order, one at a time. All
connections with bytes in flight on a *line* get equal shares of its rate. A connection over several
lines runs at the smallest of its shares. The rest of its other shares is not redistributed: a
change would then spread over all lines of the cluster. In schedules where all ranks do the same,
nothing is left over.

Shared cores are also a line: the kernel copies bytes there for the sending and for the receiving
program, so a message between nodes of one host uses it twice.
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
    """A line: a resource that bytes pass at a limited rate.

    Attributes:
        beta: seconds per byte for a connection that has it alone.
        users: connections with bytes in flight.
        saved: bytes that may pass at once.

    Args:
        beta: seconds per byte.
        burst: most bytes that it saves up while idle.
    """

    __slots__ = ("_burst", "_idle", "beta", "saved", "users")

    def __init__(self, beta: float, burst: float = 0.0) -> None:
        self.beta = beta
        self.users: list[Connection] = []
        self.saved = burst  # it was idle before
        self._burst = burst
        self._idle = 0.0  # start of the idle time

    def enter(self, connection: Connection, now: float) -> None:
        """Add a connection with bytes in flight."""
        # Saved up while idle, at the rate of the line.
        if self._burst and not self.users:
            self.saved = min(self._burst, self.saved + (now - self._idle) / self.beta)
        self.users.append(connection)

    def leave(self, connection: Connection, now: float) -> None:
        """Remove a connection."""
        self.users.remove(connection)
        # The idle time begins only with the last user, as `enter` tests.
        self._idle = now


class Connection:
    """Messages from one rank to another, over several lines at once.

    Args:
        clock: the clock.
        lines: lines that every byte passes at the same time.
        latency: further seconds of each message.
        arrive: called for each message, in order, when its last byte has been sent, with its
            arrival time.
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
        self._queue: deque[tuple[float, int]] = deque()  # (earliest start, bytes)
        self._left = 0.0  # bytes of the first message, at `_since`
        self._since = 0.0
        self._beta = 0.0  # present seconds per byte
        self._due = 0  # incremented when the scheduled end becomes invalid

    def send(self, ready: float, nbytes: int) -> None:
        """Queue a message, which starts at `ready` or after the messages before it."""
        self._queue.append((ready, nbytes))
        # Otherwise the end of the message before starts it.
        if len(self._queue) == 1:
            self._clock.at(ready, self._begin, None)

    def _begin(self, _: None) -> None:
        """Start the first message on its lines."""
        now = self._clock.now
        # 0 makes `_share` compute the rate.
        self._beta = 0.0  # not known yet
        for line in self._lines:
            # First on all lines, because the shares depend on their users.
            line.enter(self, now)
        self._since, self._left = now, self._beyond_bursts()
        for line in self._lines:
            # Only connections that share a line with this one change.
            if len(line.users) > 1:
                for other in line.users:
                    if other is not self:
                        other._share()
        self._share()

    def _beyond_bursts(self) -> float:
        """Return the bytes of the first message beyond the lines' bursts."""
        nbytes = self._queue[0][1]
        # Without bytes saved by the line of its node, none can pass at once.
        if not self._lines[0].saved:  # most clusters have no bursts
            return nbytes
        # Bytes pass at once only as far as every line has saved.
        at_once = min(nbytes, *(line.saved for line in self._lines))
        for line in self._lines:
            line.saved -= at_once
        return nbytes - at_once

    def _share(self) -> None:
        """Update the seconds per byte, and schedule the end of the first message."""
        beta = 0.0
        for line in self._lines:
            # An equal share for each user.
            cost = line.beta * len(line.users)
            if cost > beta:
                beta = cost
        # Most changes leave the slowest line unchanged.
        if beta == self._beta:
            return
        now = self._clock.now
        # The bytes that have passed at the old rate.
        if self._beta:
            self._left -= (now - self._since) / self._beta
            self._since = now
        self._beta = beta
        # The event of the old end stays in the queue, and is ignored.
        self._due += 1
        self._clock.at(now + max(self._left, 0.0) * beta, self._through, self._due)

    def _through(self, due: int) -> None:
        """Deliver the first message, unless its end was rescheduled meanwhile."""
        if due != self._due:
            return
        clock = self._clock
        queue = self._queue
        queue.popleft()
        clock.delivered += 1
        # The next message follows at the same rate: the lines stay occupied.
        if queue and queue[0][0] <= clock.now:
            self._since, self._left = clock.now, self._beyond_bursts()
            self._due += 1
            clock.at(clock.now + self._left * self._beta, self._through, self._due)
        else:
            self._due += 1
            for line in self._lines:
                line.leave(self, clock.now)
                # They get the share of this connection.
                for other in line.users:
                    if other is not self:
                        other._share()
            if queue:
                clock.at(queue[0][0], self._begin, None)
        # Last, because the receiver's program may send on this connection.
        self._arrive(clock.now + self.latency)


class NetworkModel:
    """The lines of a cluster, and the cost of messages for programs.

    Args:
        clock: the clock.
        machine: costs of messages.

    Attributes:
        between, inside: seconds that a message between nodes, or inside one, costs each program.
        nodes: node of every rank.
    """

    def __init__(self, clock: EventClock, machine: Machine) -> None:
        cluster: SimulatedCluster = clock.cluster
        node, network = machine.node, machine.network
        self.inside, self.between = machine.inside, machine.between
        self.nodes = cluster.nodes()
        self._clock = clock
        # Two programs take their parts of alpha; the rest is latency.
        self._latency = network.alpha - 2 * self.between
        self._node_beta = node.beta
        self._copying = cluster.copying
        nodes = range(cluster.num_nodes)
        self._out = [NetworkLink(network.beta, cluster.burst) for _ in nodes]
        self._in = [NetworkLink(network.beta, cluster.burst) for _ in nodes]
        # Without switches all nodes are below one.
        self._below = cluster.nodes_per_switch or cluster.num_nodes
        switches = -(-cluster.num_nodes // self._below)
        self._cores = self._of_hosts(cluster)
        # The line up has the rate of its nodes together, divided by the oversubscription.
        up = network.beta * cluster.oversubscription / self._below
        self._up = [NetworkLink(up) for _ in range(switches)]
        self._down = [NetworkLink(up) for _ in range(switches)]

    def _of_hosts(self, cluster: SimulatedCluster) -> list[tuple[NetworkLink, ...]]:
        """Return the cores of each node's host as a line, if ranks share them and bytes cost time.

        Bursts pass at once, because the programs account for their core time (`transport`).
        """
        # A host is shared if its ranks outnumber its cores.
        shared = {
            node // cluster.nodes_per_host: rank.shares
            for node, rank in zip(self.nodes, self._clock.ranks, strict=True)
        }
        cores = [
            # Unlimited bursts: only overlapping transfers wait for one another.
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
        """Return a connection from one rank to another; `arrive` as for `Connection`."""
        one, other = self.nodes[source], self.nodes[dest]
        if one == other:  # through memory; each pair has its own line
            return Connection(self._clock, (NetworkLink(self._node_beta),), 0.0, arrive)
        # In the order of the path; each byte passes all lines at the same time.
        lines = (self._out[one], self._in[other], *self._cores[one], *self._cores[other])
        above, below = one // self._below, other // self._below
        if above != below:
            lines = (*lines, self._up[above], self._down[below])
        return Connection(self._clock, lines, self._latency, arrive)
