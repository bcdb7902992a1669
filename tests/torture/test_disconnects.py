"""A mixed load of which a third of the clients leave: clients, log and /metrics agree about every request."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.torture.http_client import DEADLINE_S, Address, Connection, Response, head
from tests.torture.serving import CHAT, COMPLETIONS, MODEL, Finished, Server

NUM_CLIENTS = 12
CI_S, DEEP_S = 8.0, 60.0
LEAVING_SHARE = 0.3
# Where a client leaves: within its headers, within its body, before the response begins, or within the response.
LEAVES = ("head", "body", "prefill", "stream")
# Finish reasons, the worst first: a request with several choices finishes with the worst of them.
REASONS = ("error", "abort", "length", "stop")


@dataclass
class Entry:
    """One request in the clients' ledger. leaves: one of LEAVES, or "" if the client stays to the end."""

    request_id: str
    kind: str
    path: str
    body: bytes
    leaves: str
    patience_s: float
    num_events: int
    response: Response | None = None

    @property
    def is_generation(self) -> bool:
        return self.kind in ("chat", "completion")


def draw(random: Random, request_id: str) -> Entry:
    kind = random.choices(["chat", "completion", "tokenize", "bad"], [40, 30, 15, 15])[0]
    path, fields = request_of(random, kind)
    leaves = random.choice(LEAVES) if random.random() < LEAVING_SHARE else ""
    if leaves and kind in ("chat", "completion"):
        # So long that it is still running when the client leaves.
        fields |= {"max_tokens": 1200, "ignore_eos": True}
    body = (
        b"{" + json.dumps(fields).encode() if kind == "bad" and random.random() < 0.5 else json.dumps(fields).encode()
    )
    if leaves == "stream" and not fields.get("stream"):
        leaves = "prefill"
    return Entry(request_id, kind, path, body, leaves, random.uniform(0, 0.2), random.randint(1, 5))


def request_of(random: Random, kind: str) -> tuple[str, dict[str, Any]]:
    words = " ".join(
        random.choice(["port", "server", "Pagewick", "why", "token", "7"]) for _ in range(random.randint(1, 60))
    )
    match kind:
        case "chat":
            usage = {"include_usage": True}
            message = {"role": "user", "content": words}
            return CHAT, {
                "messages": [message],
                "stream": True,
                "stream_options": usage,
                "max_tokens": random.randint(1, 24),
            }
        case "completion":
            n, stream = random.randint(1, 4), random.random() < 0.3
            usage = {"stream_options": {"include_usage": True}} if stream else {}
            fields = {"prompt": words, "n": n, "max_tokens": random.randint(1, 16), "stream": stream}
            return COMPLETIONS, {"model": MODEL, **fields, **usage}
        case "tokenize":
            return "/tokenize", {"prompt": words}
    wrong = {"max_tokens": -1, "n": 0, "model": "no/such-model", "temperature": "hot", "messages": 7}
    name = random.choice(list(wrong))
    return CHAT, {"messages": [{"role": "user", "content": words}], name: wrong[name]}


async def carry_out(address: Address, entry: Entry) -> None:
    async with asyncio.timeout(DEADLINE_S), await Connection.open(address) as connection:
        first = head("POST", entry.path, address, len(entry.body), {"x-request-id": entry.request_id})
        cut = {"head": first[:-3], "body": first + entry.body[: len(entry.body) // 2]}
        connection.writer.write(cut.get(entry.leaves, first + entry.body))
        await connection.writer.drain()
        if not entry.leaves:
            entry.response = await connection.read()
        elif entry.leaves == "stream":
            entry.response = await connection.read(num_events=entry.num_events)
        else:
            with contextlib.suppress(TimeoutError):
                # A response that arrives meanwhile is not read, so the client does not know of it.
                await asyncio.sleep(entry.patience_s)


async def run_load(address: Address, seed: int, seconds: float) -> list[Entry]:
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    ledger: list[Entry] = []

    async def client(number: int) -> None:
        random = Random(f"{seed}-{number}")
        while loop.time() < until:
            entry = draw(random, f"t{seed}-{number}-{len(ledger)}")
            ledger.append(entry)
            await carry_out(address, entry)

    await asyncio.gather(*(client(number) for number in range(NUM_CLIENTS)))
    return ledger


def usage_of(response: Response) -> dict[str, int]:
    parts = response.chunks if response.events else [response.json()]
    (usage,) = [part["usage"] for part in parts if part.get("usage")]
    return dict(usage)


def check_one(entry: Entry, finished: list[Finished], refused: list[int]) -> None:
    """Check that the log agrees with what the client knows about its request."""
    response = entry.response
    if entry.leaves in ("head", "body"):
        assert not finished and not refused
    elif entry.leaves == "prefill":
        # It may have finished before the client left, or never have begun. Invalid ones may have been refused.
        assert len(finished) + len(refused) <= 1
        assert not refused or entry.kind == "bad"
    elif response is not None and entry.is_generation:
        assert response.status == 200
        (one,) = finished
        assert not refused
        if response.is_whole:
            reasons = response.finish_reasons.values()
            usage = usage_of(response)
            assert one.reason == next(reason for reason in REASONS if reason in reasons)
            assert (one.num_prompt_tokens, one.num_generated) == (usage["prompt_tokens"], usage["completion_tokens"])
            assert not response.events or response.events[-1] == "[DONE]"
        else:
            # The engine may have finished by the time at which a busy server sees that the client has left.
            assert one.reason == "abort" or one.reason in REASONS
    elif response is not None:
        assert response.is_whole and not finished
        assert response.status == (
            200
            if entry.kind == "tokenize"
            else 404
            if entry.body.startswith(b'{"') and b"no/such" in entry.body
            else 400
        )
        assert refused == ([] if response.status == 200 else [response.status])
        assert response.status == 200 or response.error


def expected_statuses(ledger: list[Entry]) -> tuple[Counter[str], int]:
    """Return the number of requests by the status that their clients know, and the number without a known status."""
    known: Counter[str] = Counter()
    num_unknown = 0
    for entry in ledger:
        if entry.leaves == "body":
            known["499"] += 1
        elif entry.leaves == "prefill":
            num_unknown += 1
        elif entry.response is not None:
            known[str(entry.response.status)] += 1
    return known, num_unknown


def test_every_request_is_counted_once(server: Server, seed: int, is_deep: bool) -> None:
    before = server.metrics()
    ledger = asyncio.run(run_load(server.address, seed, DEEP_S if is_deep else CI_S))
    known, num_unknown = expected_statuses(ledger)
    num_expected = before.statuses.total() + known.total() + num_unknown
    # A client may leave before the server has accepted its request: engine and log know nothing of that request yet.
    server.until(lambda: server.metrics().statuses.total() >= num_expected)
    after = server.wait_until_idle()
    finished, refused = server.requests_in_log(f"t{seed}-")
    left_early = [
        one.reason
        for entry in ledger
        if entry.is_generation and entry.response is not None and not entry.response.is_whole
        for one in finished.get(entry.request_id, [])
    ]
    assert left_early.count("abort") > len(left_early) / 2
    for entry in ledger:
        try:
            check_one(entry, finished.get(entry.request_id, []), refused.get(entry.request_id, []))
        except AssertionError as error:
            raise AssertionError(
                f"{entry}: {finished.get(entry.request_id)}, {refused.get(entry.request_id)}"
            ) from error
    assert {*finished, *refused} <= {entry.request_id for entry in ledger}

    ends = [one for ones in finished.values() for one in ones]
    assert after.accepted - before.accepted == len(ends)
    assert after.finished - before.finished == Counter(one.reason for one in ends)
    name = "vllm:request_generation_tokens_sum"
    assert after[name] - before[name] == sum(one.num_generated for one in ends)

    seen = after.statuses - before.statuses
    assert set(seen) <= {"200", "400", "404", "499"}
    assert not known - seen
    assert (seen - known).total() == num_unknown
    left = Counter(entry.leaves for entry in ledger)
    assert all(left[one] for one in LEAVES), "the load was too short: not every way of leaving occurred"
    print(
        f"{len(ledger)} requests, left: {dict(left)}, ended: {dict(Counter(one.reason for one in ends))}, {dict(seen)}"
    )
    assert server.troubles() == []
