"""Sockets and interfaces of a group. The addresses of machines are made up, as if a resolver had returned them."""

from __future__ import annotations

import os
import socket
from typing import Any

import psutil
import pytest

from pagewick.errors import ConfigError
from pagewick.parallel import collectives
from pagewick.parallel.rendezvous import interface_to_master, open_listener
from pagewick.parallel.topology import Topology

ONE_HOST = Topology(0, 2, 0, 2, 0, "127.0.0.1", 0, "spawn")
TWO_HOSTS = Topology(0, 2, 0, 1, 0, "node1", 29500, "slurm")


def test_one_host_meets_on_the_loopback_interface() -> None:
    name = interface_to_master(ONE_HOST)
    assert name is not None
    assert "127.0.0.1" in [entry.address for entry in psutil.net_if_addrs()[name]]
    with open_listener(ONE_HOST) as listener:
        address, port = listener.getsockname()
        assert address == "127.0.0.1"
        assert port > 0
        socket.create_connection((address, port)).close()


def test_a_port_is_never_given_twice() -> None:
    with open_listener(ONE_HOST) as first, open_listener(ONE_HOST) as second:
        assert first.getsockname() != second.getsockname()


def test_a_name_that_means_this_machine_only_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        assert host == "node1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for use in (open_listener, interface_to_master):
        with pytest.raises(ConfigError, match=r"'node1' resolves to 127\.0\.1\.1 .*give MASTER_ADDR"):
            use(TWO_HOSTS)


def test_the_environment_is_left_as_it_was() -> None:
    before = dict(os.environ)
    with collectives._on_interface_to_master(ONE_HOST):
        assert os.environ["GLOO_SOCKET_IFNAME"] == interface_to_master(ONE_HOST)
    assert dict(os.environ) == before


def test_a_users_choice_of_interface_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine0")
    with collectives._on_interface_to_master(ONE_HOST):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "mine0"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine0"
