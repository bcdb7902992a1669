"""Heartbeat: ranks on several machines notice within seconds that one of them has ended, stopped or been cut off.

A collective does not: a machine without power closes no connection, so that a rank waits for the next plan without a
limit, and in NCCL for ten minutes. Therefore a thread of each rank has a connection to rank 0, over which both send a
beat every second. A rank is lost when its connection ends, or when no beat has come for the time limit. Rank 0 tells
the others which one is lost and why. Then each rank logs it and ends its process, because nothing else ends a
collective that hangs in C++. To rank 0's supervisor this is a dead engine like any other.

Messages are lines: an empty one is a beat, BYE says that the engine ends in order, and any other one says which rank is
lost and why. Imports no torch.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from pagewick.log import get_logger
from pagewick.parallel.rendezvous import address_to_master
from pagewick.parallel.topology import Topology

_INTERVAL_S: Final = 1.0
# With a short limit there are more beats, so that one that comes late does not matter.
_LEAST_BEATS: Final = 5
_SHORTEST_INTERVAL_S: Final = 0.05
# An exception of a collective says more to the caller: it may end the process within this time.
_GRACE_S: Final = 2.0
# For a log that never returns, because nobody reads the pipe.
_LAST_RESORT_S: Final = 5.0
_INVITATION: Final = "heartbeat of rank 0"
_BYE: Final = "bye"
_MOST_BYTES: Final = 4096

logger = get_logger(__name__)


class Store(Protocol):
    """The part of torch's stores that is needed here. get: waits until the key is set."""

    def set(self, key: str, value: str, /) -> object: ...

    def get(self, key: str, /) -> bytes: ...


class _Invitation(msgspec.Struct):
    """Where rank 0 expects the others. secret: keeps other programs out. silence_s: as for begin_heartbeat."""

    host: str
    port: int
    secret: str
    silence_s: float


@dataclass(eq=False, slots=True)
class _Peer:
    """A rank at the other end of a connection."""

    rank: int
    host: str
    connection: socket.socket
    heard_at: float = 0.0
    received: bytes = b""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


def begin_heartbeat(store: Store, topology: Topology, silence_s: float, start_timeout_s: float) -> Heartbeat | None:
    """Begin to watch the other ranks, once all have signed in at the store; None if all are on one machine.

    There, the process that has started them sees them end. silence_s: seconds without a beat after which a rank is
    lost, 0 for never; that of rank 0 counts. Raises OSError if they do not find each other in start_timeout_s seconds.
    """
    if topology.local_world_size == topology.world_size:
        return None
    if topology.rank == 0:
        return Heartbeat(_await_peers(store, topology, silence_s, start_timeout_s), silence_s)
    invitation = msgspec.json.decode(store.get(_INVITATION), type=_Invitation)
    connection = socket.create_connection((invitation.host, invitation.port), timeout=start_timeout_s)
    connection.sendall(f"{invitation.secret} {topology.rank}\n".encode())
    # The first beat comes once all ranks are there, which is not yet a matter of silence_s.
    if not connection.recv(1):
        raise ConnectionError("rank 0 closed the connection of the heartbeat")
    return Heartbeat([_Peer(0, invitation.host, connection)], invitation.silence_s)


def _await_peers(store: Store, topology: Topology, silence_s: float, start_timeout_s: float) -> list[_Peer]:
    """On rank 0, return the other ranks once all have connected."""
    deadline = time.monotonic() + start_timeout_s
    family, host = address_to_master(topology)
    peers: dict[int, _Peer] = {}
    # Like rank 0's store, it listens on the interface that all ranks use, and on no other.
    with socket.create_server((host, 0), family=family, backlog=topology.world_size) as listener:
        invitation = _Invitation(host, listener.getsockname()[1], secrets.token_hex(16), silence_s)
        store.set(_INVITATION, msgspec.json.encode(invitation).decode())
        while len(peers) < topology.world_size - 1:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            connection, address = listener.accept()
            rank = _rank_of(connection, invitation.secret, topology.world_size)
            if rank is None or rank in peers:
                connection.close()
            else:
                peers[rank] = _Peer(rank, str(address[0]), connection)
    return list(peers.values())


def _rank_of(connection: socket.socket, secret: str, world_size: int) -> int | None:
    """Return which rank has connected; None for another program."""
    connection.settimeout(_INTERVAL_S)
    try:
        with connection.makefile("rb") as stream:
            given, _, rank = stream.readline(_MOST_BYTES).decode("ascii").strip().partition(" ")
    except (OSError, UnicodeDecodeError):
        return None
    if not hmac.compare_digest(given, secret) or not rank.isdigit() or not 0 < int(rank) < world_size:
        return None
    return int(rank)


class Heartbeat:
    """A thread that sends beats to other ranks, and ends this process when one of them is lost.

    silence_s: as for begin_heartbeat. end_process: ends it; tests have one that does not.
    """

    def __init__(
        self, peers: Sequence[_Peer], silence_s: float, end_process: Callable[[], None] = lambda: os._exit(1)
    ) -> None:
        self._peers = list(peers)
        self._silence_s = silence_s
        wanted_s = silence_s / _LEAST_BEATS if silence_s else _INTERVAL_S
        self._interval_s = min(max(wanted_s, _SHORTEST_INTERVAL_S), _INTERVAL_S)
        self._end_process = end_process
        self._says_bye = False
        self._is_closing = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._closer, woken = socket.socketpair()
        self._selector.register(woken, selectors.EVENT_READ)
        for peer in self._peers:
            peer.connection.setblocking(False)
            # Not when it connected: the first beats come once all ranks have.
            peer.heard_at = time.monotonic()
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self, *, says_bye: bool = False) -> None:
        """End the thread; may be called twice. says_bye: tell the others that this process ends in order.

        If it does not say so, they lose it.
        """
        if not self._is_closing.is_set():
            self._says_bye = says_bye
            self._is_closing.set()
            self._closer.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            loss = self._watch()
            if loss and not self._is_closing.is_set():
                self._tell(loss)
                self._end(loss)
            elif self._says_bye:
                self._tell(_BYE)
        finally:
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]  # all are sockets
            self._selector.close()

    def _watch(self) -> str:
        """Exchange beats until the end; return which rank is lost and why, empty if the engine ends in order."""
        beat_at = 0.0
        while not self._is_closing.is_set():
            ready = [key.data for key, _ in self._selector.select(self._interval_s)]
            # Beats that arrived while this process was stopped are read before anything is concluded from silence.
            for peer in filter(None, ready):
                if (news := self._read(peer)) is not None:
                    return "" if news == _BYE else news
            now = time.monotonic()
            if now >= beat_at:
                beat_at = now + self._interval_s
                self._tell("")
            for peer in self._peers:
                if self._silence_s and now - peer.heard_at > self._silence_s:
                    return (
                        f"{peer} has given no sign of life for {now - peer.heard_at:.0f} seconds (--rank-timeout): its"
                        " machine is off or cut off, or its process is stopped"
                    )
        return ""

    def _read(self, peer: _Peer) -> str | None:
        """Return what a rank has said beside beats; None for nothing."""
        try:
            received = peer.connection.recv(_MOST_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            received, how = b"", f" ({error.strerror})"
        else:
            how = ""
        if not received:
            return f"{peer} has ended{how}, and its own log says why"
        peer.heard_at = time.monotonic()
        *lines, peer.received = (peer.received + received).split(b"\n")
        # A line that never ends is not ours.
        peer.received = peer.received[-_MOST_BYTES:]
        return next((line.decode(errors="replace") for line in lines if line), None)

    def _tell(self, line: str) -> None:
        for peer in self._peers:
            try:
                peer.connection.send(line.encode() + b"\n")
            except OSError:
                continue  # reading says what is wrong with it

    def _end(self, loss: str) -> None:
        """Log the loss and end the process, unless an exception has closed this meanwhile."""
        last_resort = threading.Timer(_LAST_RESORT_S, self._end_process)
        last_resort.daemon = True
        last_resort.start()
        logger.error("%s; this process ends with it: start that rank again", loss)
        if not self._is_closing.wait(_GRACE_S):
            logging.shutdown()
            self._end_process()
        last_resort.cancel()
