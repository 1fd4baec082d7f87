"""Transport between simulated ranks.

A message costs both programs some time, when it is started and when its arrival is noticed. One of
up to `EAGER_BYTES` goes at once, and its memory is free again; a longer one asks first, and goes
when the receiver has answered that it knows where to put it, two ways later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from collectives.arrays.device import DeviceBuffer
from collectives.arrays.host_arrays import Array, raw_bytes
from collectives.core.errors import MismatchError
from collectives.core.links import Machine
from collectives.simulation.clock import NEVER, EventClock, SimulatedRank
from collectives.simulation.cpu_scheduler import WaitingRank
from collectives.simulation.network import NetworkModel
from collectives.transport.transport import Deadline, PendingMessage, Transport

__all__ = ["EAGER_BYTES", "SimulatedFabric", "SimulatedTransport"]

# What `launch` sets for Open MPI over TCP: a slice of a ring goes without asking.
EAGER_BYTES = 270336

# What the kernel hands on as one piece (TCP's offload). Programs that share cores copy longer
# messages while the pieces before are on the line.
_PIECE_BYTES = 64 << 10


class _End:
    """One end of a message: a send, or a receive.

    Attributes:
        when: seconds on the clock when it is done; `NEVER` as long as that is not known.
        cost: what noticing it costs the program.
        other: the other end, when both are known.
        memory: of a send, its bytes, as they are or were; None if nobody asks for them.
        landed: of a send, when it is there, if no receive has been started by then.
    """

    __slots__ = ("_name", "cost", "landed", "memory", "nbytes", "other", "peer", "rank", "ready",
                 "verb", "when")  # fmt: skip

    def __init__(self, transport: SimulatedTransport, memory: Any, peer: int, verb: str) -> None:
        self.rank = transport.simulated
        self.nbytes: int = memory.nbytes
        self.memory: Any = memory
        self.peer = peer
        self.verb = verb
        self.cost = 0.0
        self.when = self.landed = NEVER
        self.ready = self.rank.now
        self.other: _End | None = None
        self._name = transport.name

    def done(self) -> bool:
        return self.when <= self.rank.now

    def describe(self) -> str:
        return f"{self._name([self.peer])} to {self.verb} {self.nbytes} bytes"

    @property
    def peers(self) -> Sequence[int]:
        return (self.peer,)


class _Pair:
    """What is under way from one rank to another, in one direction."""

    __slots__ = ("connection", "cost", "receives", "receiving", "sending", "sends", "under_way")

    def __init__(self, network: SimulatedFabric, source: int, dest: int) -> None:
        self.connection = network.lines.connect(source, dest, self._arrive)
        self.cost = network.lines.cost(source, dest)
        # Seconds of a byte, of the programs that share their cores.
        copying, ranks = network.lines.copying(source, dest), network.clock.ranks
        self.sending = copying if ranks[source].shares else 0.0
        self.receiving = copying if ranks[dest].shares else 0.0
        self.sends: deque[_End] = deque()  # for which no receive has been started
        self.receives: deque[_End] = deque()  # for which no send has been started
        self.under_way: deque[_End] = deque()  # sends that the connection has

    def _arrive(self, when: float) -> None:
        """Let the receiver have a message, if it has asked for it."""
        send = self.under_way.popleft()
        receive = send.other
        if receive is None:
            send.landed = when
        else:
            _deliver(send, receive, when)
        if send.when == NEVER:
            send.when = when
            if send.rank.waits_for is send:
                send.rank.wake(when)


def _deliver(send: _End, receive: _End, when: float) -> None:
    """Fill the receiver's memory, and let it go on if it waits."""
    if send.memory is not None and send.nbytes == receive.nbytes:
        _bytes(receive.memory)[:] = _bytes(send.memory)
    # Nobody looks in a circle: objects go as soon as they are done with, millions in a simulation.
    send.memory = send.other = None
    receive.when = when
    if receive.rank.waits_for is receive:
        receive.rank.wake(when)


def _bytes(memory: Any) -> Array:
    return raw_bytes(memory.view if isinstance(memory, DeviceBuffer) else memory)


class SimulatedFabric:
    """What the transports of all ranks of a cluster share.

    Args:
        clock: of the ranks.
        machine: what messages cost.
        waiting: how a rank waits for one.
        payload: whether bytes are moved, or counted only.
        eager: bytes of the longest message that does not ask first; -1 if all do.
    """

    def __init__(
        self,
        clock: EventClock,
        machine: Machine,
        waiting: WaitingRank,
        *,
        payload: bool,
        eager: int = EAGER_BYTES,
    ) -> None:
        self.clock = clock
        self.waiting = waiting
        self.lines = NetworkModel(clock, machine)
        self.payload = payload
        self.eager = eager
        self._pairs: dict[tuple[int, int], _Pair] = {}

    def pair(self, source: int, dest: int) -> _Pair:
        """Return what is under way from one rank to another."""
        found = self._pairs.get((source, dest))
        if found is None:
            found = self._pairs[source, dest] = _Pair(self, source, dest)
        return found


class SimulatedTransport(Transport):
    """Messages of one simulated rank.

    Args:
        network: of all ranks.
        simulated: this one.
    """

    def __init__(self, network: SimulatedFabric, simulated: SimulatedRank) -> None:
        self.simulated = simulated
        self.rank, self.size = simulated.number, simulated.size
        self._network = network
        self._to: dict[int, _Pair] = {}
        self._from: dict[int, _Pair] = {}

    def _start_send(self, data: Array, dest: int) -> PendingMessage:
        network, rank = self._network, self.simulated
        pair = self._to.get(dest)
        if pair is None:
            pair = self._to[dest] = network.pair(self.rank, dest)
        first = min(data.nbytes, _PIECE_BYTES)
        rank.advance(pair.cost + pair.sending * first if pair.sending else pair.cost)
        send = _End(self, data, dest, "receive")
        if not network.payload:
            send.memory = None
        receive = pair.receives.popleft() if pair.receives else None
        if receive is not None:
            send.other, receive.other = receive, send
        else:
            pair.sends.append(send)
        if send.nbytes <= network.eager:
            if pair.sending and send.nbytes > first:
                rank.advance(pair.sending * (send.nbytes - first))
            send.when = rank.now
            if send.memory is not None:
                send.memory = _bytes(data).copy()
            self._go(pair, send, send.ready)
        elif receive is not None:
            self._answer(pair, send, receive)
        return send

    def _start_receive(self, into: Array, source: int) -> PendingMessage:
        network, rank = self._network, self.simulated
        pair = self._from.get(source)
        if pair is None:
            pair = self._from[source] = network.pair(source, self.rank)
        if rank.now >= rank.dies:
            rank.advance(0.0)
        receive = _End(self, into, source, "send")
        receive.cost = pair.cost
        if pair.receiving:
            receive.cost += pair.receiving * min(into.nbytes, _PIECE_BYTES)
        if not pair.sends:
            pair.receives.append(receive)
            return receive
        send = pair.sends.popleft()
        send.other, receive.other = receive, send
        if send.nbytes > network.eager:
            self._answer(pair, send, receive)
        elif send.landed != NEVER:
            _deliver(send, receive, send.landed)
        return receive

    def _answer(self, pair: _Pair, send: _End, receive: _End) -> None:
        """Let a message go that has asked first: the answer takes a way, as the question did."""
        way = pair.connection.latency
        self._go(pair, send, max(send.ready + way, receive.ready) + way)

    def _go(self, pair: _Pair, send: _End, ready: float) -> None:
        pair.under_way.append(send)
        pair.connection.send(ready, send.nbytes)

    def wait(self, messages: Sequence[PendingMessage], deadline: Deadline) -> None:
        """Wait on the clock of the cluster.

        The deadline's limit, which is one of real time, does not count: where nothing is on its way
        any more, the ranks that wait hear so at once.
        """
        rank = self.simulated
        for message in messages:
            if type(message) is not _End:  # of no bytes
                continue
            if message.when == NEVER:
                rank.wait(message, deadline.operation, self._network.waiting)
            elif message.when > rank.now:
                rank.sleep(message.when, message, deadline.operation, self._network.waiting)
            if message.cost:
                rank.advance(message.cost)
                message.cost = 0.0
            other = message.other
            if message.verb == "send" and other is not None and other.nbytes != message.nbytes:
                raise MismatchError(
                    f"receive: {self.name([message.peer])} sent an array of another length, "
                    f"expected {message.nbytes} bytes, got {other.nbytes} ({self.where})"
                )

    def check_peers(self, operation: str, peers: Sequence[int] = ()) -> None:
        """Raise if a rank is known to be dead."""
        if self._network.clock.dead:
            raise self.simulated.from_failed(operation)

    def split(self, color: int | None, key: int) -> Transport | None:
        """Refuse: what is simulated runs below communicators."""
        raise NotImplementedError("split: simulated ranks have one group")

    def close(self) -> None:
        """Nothing is held."""
