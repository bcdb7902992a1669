"""HubState: everything that the API processes of a server have in common, and the news for all of them."""

from __future__ import annotations

import asyncio

import msgspec
from prometheus_client import CollectorRegistry

from pagewick.engine.health import EngineHealth
from pagewick.engine.model_info import ModelInfo
from pagewick.engine.supervisor import Supervisor
from pagewick.server.core.conversations import Conversations
from pagewick.server.core.stored_responses import StoredResponses
from pagewick.server.hub.messages import State, raw
from pagewick.server.hub.peer import Peer
from pagewick.server.telemetry.engine_metrics import EngineCollector
from pagewick.server.telemetry.metric_sums import Family, families_of, summed, totals
from pagewick.server.telemetry.metrics import process_registry

# Seconds until an API process without news of its own learns the engine's statistics.
_REFRESH_S = 0.1
# Seconds to wait for the report of an API process; then its latest counts.
_REPORT_S = 2.0


class HubState:
    """peers: the API processes that have loaded, by index. engine: None until it is there."""

    def __init__(self, session_ttl_s: float, model_name: str) -> None:
        self.conversations = Conversations(session_ttl_s)
        self.responses = StoredResponses()
        self.engine: Supervisor | None = None
        self.peers: dict[int, Peer] = {}
        self._model_name = model_name
        self._registry: CollectorRegistry = process_registry()
        self._past: list[Family] = []
        self._told: tuple[EngineHealth, ModelInfo] | None = None
        self._refreshing: asyncio.TimerHandle | None = None

    def use(self, engine: Supervisor) -> None:
        """Let the API processes serve with this engine."""
        self.engine = engine
        collector = EngineCollector(self._model_name, engine.info, lambda: engine.stats, lambda: engine.health)
        self._registry.register(collector)
        engine.on_news = self._pass_on
        self._told = (engine.health, engine.info)
        for peer in self.peers.values():
            peer.serve(engine)

    def admit(self, index: int, peer: Peer) -> None:
        """Note that an API process has loaded. It serves as soon as there is an engine."""
        self.peers[index] = peer
        if self.engine is not None:
            peer.serve(self.engine)

    def part_with(self, index: int, peer: Peer) -> None:
        """Forget an API process that is over, except for its counts."""
        self.peers.pop(index, None)
        peer.close()
        if peer.report is not None:
            families = msgspec.msgpack.decode(peer.report, type=list[Family])
            self._past = summed([self._past, totals(families)])

    async def reports(self) -> list[msgspec.Raw]:
        """Return the metrics of all processes, each as a list of Families.

        A process that does not respond counts as it last reported. Only the first call waits for it.
        """
        peers = [peer for peer in self.peers.values() if peer.serving.is_set()]
        if wanted := [peer.wanted_report() for peer in peers if peer.owed_s < _REPORT_S]:
            await asyncio.wait(wanted, timeout=_REPORT_S)
        own = [raw(self._past), raw(families_of(self._registry))]
        return own + [peer.report for peer in peers if peer.report is not None]

    def _pass_on(self) -> None:
        """Send each API process its news, which one read from the engine has brought."""
        engine = self.engine
        assert engine is not None, "it has news"
        stats, state = engine.stats, (engine.health, engine.info)
        if state != self._told:
            self._told = state
            for peer in self.peers.values():
                peer.send(State(engine.info, engine.health))
        for peer in self.peers.values():
            peer.pass_on(stats)
        if self._refreshing is None:
            self._refreshing = asyncio.get_running_loop().call_later(_REFRESH_S, self._refresh)

    def _refresh(self) -> None:
        self._refreshing = None
        assert self.engine is not None, "it had news"
        stats = self.engine.stats
        for peer in self.peers.values():
            peer.refresh(stats)
