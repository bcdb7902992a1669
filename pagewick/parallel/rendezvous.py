"""The listening socket of rank 0, and the network interface that all ranks use. Imports no torch.

Nothing here listens on all interfaces. PyTorch's security guide calls its distributed traffic unauthenticated
and unencrypted, so it stays on the loopback interface when all ranks share a machine, and otherwise on the
one interface that leads to the master address.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import Any

import psutil

from pagewick.errors import ConfigError
from pagewick.parallel.topology import LOOPBACK, Topology, is_loopback

_BACKLOG = 1024


def open_listener(topology: Topology) -> socket.socket:
    """Open a socket that listens at the master address and port (port 0: any free one), for rank 0's store.

    The socket is held from the moment the port is chosen, so that no other process can take the port in between.
    Raises ConfigError if the name does not resolve or belongs to another machine, or if the port is in use.
    """
    family, address = _resolve(topology)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # This allows a port in TIME_WAIT, left by a restarted group, but not one on which another process listens.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        where = f"{address[0]}:{address[1]}"
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"{where} is in use by another process: set MASTER_PORT to another") from error
        raise ConfigError(
            f"rank 0 cannot listen at {where} ({error.strerror}): the master address must be one of its own machine"
        ) from error
    return listener


def address_to_master(topology: Topology) -> tuple[socket.AddressFamily, str]:
    """Return this machine's own address on the way to rank 0's machine, where the other ranks can reach it.

    Raises ConfigError as interface_to_master does.
    """
    family, address = _resolve(topology)
    # Connecting a datagram socket sends nothing; it only asks the kernel for the route.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address[0], address[1] or 1, *address[2:]))
        except OSError as error:
            raise ConfigError(
                f"no route to the master address {address[0]} ({error.strerror}): check MASTER_ADDR"
            ) from error
        return family, str(probe.getsockname()[0])


def interface_to_master(topology: Topology) -> str | None:
    """Return the name of the interface that the ranks share (`lo`, `eth0`), or None if the system does not tell.

    Raises ConfigError if the master address does not resolve to an address that the other machines can reach.
    """
    _, own_address = address_to_master(topology)
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == own_address for entry in addresses):
            return str(name)
    return None


def _resolve(topology: Topology) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    host = LOOPBACK if topology.is_single_host else topology.master_addr
    try:
        family, _, _, _, address = socket.getaddrinfo(host, topology.master_port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(
            f"the master address {host!r} cannot be resolved ({error}): set MASTER_ADDR to"
            " the address of rank 0's machine"
        ) from error
    # Debian maps a machine's own name to 127.0.1.1, which no other machine can reach.
    if not is_loopback(host) and ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise ConfigError(
            f"the master address {host!r} resolves to {address[0]} on this machine, which no other machine"
            " can reach: give MASTER_ADDR as a number, for example 10.0.0.1"
        )
    return family, address
