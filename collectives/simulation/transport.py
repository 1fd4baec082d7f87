"""Transport between simulated ranks.

A message costs both programs some time: when it is started, and when its arrival is noticed. A
message of up to `EAGER_BYTES` is sent at once, and its memory is free again. A longer one uses a
rendezvous: it starts when the receiver's answer arrives, two latencies later.
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

# The limit that `launch` sets for Open MPI over TCP: slices of a ring are sent eagerly.
EAGER_BYTES = 270336

# Size of the kernel's packets (TCP segmentation offload). Programs on shared cores copy longer
# messages while earlier packets are on the line.
_PIECE_BYTES = 64 << 10


class _End:
    """One end of a message: a send, or a receive.

    Attributes:
        when: seconds on the clock when it completes; `NEVER` while unknown.
        cost: seconds that noticing completion costs the program.
        other: the other end, once both exist.
        memory: bytes of a send, or a copy of them; None if no one reads them.
        landed: arrival time of a send without a receive.
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
        # Times are unknown until the other side has acted.
        self.when = self.landed = NEVER
        # The program's time, which may be ahead of the clock.
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
    """Messages from one rank to another, in one direction."""

    __slots__ = ("connection", "cost", "receives", "receiving", "sending", "sends", "under_way")

    def __init__(self, network: SimulatedFabric, source: int, dest: int) -> None:
        # Messages of a pair keep their order on one connection.
        self.connection = network.lines.connect(source, dest, self._arrive)
        self.cost = network.lines.cost(source, dest)
        # Seconds per byte of programs that share their cores.
        copying, ranks = network.lines.copying(source, dest), network.clock.ranks
        # Without sharing, copying overlaps with the line.
        self.sending = copying if ranks[source].shares else 0.0
        self.receiving = copying if ranks[dest].shares else 0.0
        self.sends: deque[_End] = deque()  # without a matching receive
        self.receives: deque[_End] = deque()  # without a matching send
        self.under_way: deque[_End] = deque()  # sends on the connection

    def _arrive(self, when: float) -> None:
        """Deliver a message to its receive, or keep its arrival time."""
        # In order, as the connection carries them.
        send = self.under_way.popleft()
        receive = send.other
        if receive is None:
            # The receive will find the message there.
            send.landed = when
        else:
            _deliver(send, receive, when)
        # A rendezvous send completes with its arrival.
        if send.when == NEVER:
            send.when = when
            if send.rank.waits_for is send:
                send.rank.wake(when)


def _deliver(send: _End, receive: _End, when: float) -> None:
    """Fill the receiver's memory, and wake it if it waits."""
    # Different lengths raise in `wait`; then nothing is copied.
    if send.memory is not None and send.nbytes == receive.nbytes:
        _bytes(receive.memory)[:] = _bytes(send.memory)
    # Breaks the reference cycle, because garbage collection is off and simulations have millions.
    send.memory = send.other = None
    receive.when = when
    if receive.rank.waits_for is receive:
        receive.rank.wake(when)


def _bytes(memory: Any) -> Array:
    return raw_bytes(memory.view if isinstance(memory, DeviceBuffer) else memory)


class SimulatedFabric:
    """State that the transports of all ranks share.

    Args:
        clock: the clock.
        machine: costs of messages.
        waiting: how a rank waits for a message.
        payload: whether bytes are copied, or only counted.
        eager: bytes of the longest eager message; -1 for none.
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
        """Return the messages from one rank to another."""
        found = self._pairs.get((source, dest))
        if found is None:
            found = self._pairs[source, dest] = _Pair(self, source, dest)
        return found


class SimulatedTransport(Transport):
    """Messages of one simulated rank.

    Args:
        network: the network of all ranks.
        simulated: this rank.
    """

    def __init__(self, network: SimulatedFabric, simulated: SimulatedRank) -> None:
        self.simulated = simulated
        self.rank, self.size = simulated.number, simulated.size
        self._network = network
        self._to: dict[int, _Pair] = {}
        self._from: dict[int, _Pair] = {}

    def _start_send(self, data: Array, dest: int) -> PendingMessage:
        network, rank = self._network, self.simulated
        # Looked up once for each peer.
        pair = self._to.get(dest)
        if pair is None:
            pair = self._to[dest] = network.pair(self.rank, dest)
        first = min(data.nbytes, _PIECE_BYTES)
        # The program copies the first piece before the line starts.
        rank.advance(pair.cost + pair.sending * first if pair.sending else pair.cost)
        send = _End(self, data, dest, "receive")
        # Nothing to copy, so the caller's memory is not kept alive.
        if not network.payload:
            send.memory = None
        # The oldest receive, as in MPI.
        receive = pair.receives.popleft() if pair.receives else None
        if receive is not None:
            send.other, receive.other = receive, send
        else:
            pair.sends.append(send)
        if send.nbytes <= network.eager:
            # The rest is copied while the first piece is on the line.
            if pair.sending and send.nbytes > first:
                rank.advance(pair.sending * (send.nbytes - first))
            send.when = rank.now
            if send.memory is not None:
                # The caller may reuse its memory at once.
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
        # A rank that is past its death must not receive.
        if rank.now >= rank.dies:
            rank.advance(0.0)
        receive = _End(self, into, source, "send")
        receive.cost = pair.cost
        if pair.receiving:
            # The last piece is copied after its arrival.
            receive.cost += pair.receiving * min(into.nbytes, _PIECE_BYTES)
        if not pair.sends:
            pair.receives.append(receive)
            return receive
        send = pair.sends.popleft()
        send.other, receive.other = receive, send
        if send.nbytes > network.eager:
            self._answer(pair, send, receive)
        elif send.landed != NEVER:
            # It has arrived before the receive was posted.
            _deliver(send, receive, send.landed)
        return receive

    def _answer(self, pair: _Pair, send: _End, receive: _End) -> None:
        """Start a rendezvous message: request and answer each take one latency."""
        way = pair.connection.latency
        # Whichever is later: the sender's request, or the receive.
        self._go(pair, send, max(send.ready + way, receive.ready) + way)

    def _go(self, pair: _Pair, send: _End, ready: float) -> None:
        pair.under_way.append(send)
        pair.connection.send(ready, send.nbytes)

    def wait(self, messages: Sequence[PendingMessage], deadline: Deadline) -> None:
        """Wait in virtual time.

        The deadline's limit does not apply, because it is in real time. If nothing is in flight,
        the waiting ranks raise at once.
        """
        rank = self.simulated
        for message in messages:
            if type(message) is not _End:  # a message of no bytes
                continue
            # Unknown: an event will wake this rank.
            if message.when == NEVER:
                rank.wait(message, deadline.operation, self._network.waiting)
            elif message.when > rank.now:
                rank.sleep(message.when, message, deadline.operation, self._network.waiting)
            if message.cost:
                # Noticing the arrival costs time only once.
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
