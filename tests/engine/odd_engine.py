"""An engine process that goes wrong, or slow, when the first token of a prompt says so.

`python -m` takes it in place of pagewick.engine_process.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from pagewick import engine_process
from pagewick.engine.engine import Engine
from pagewick.engine.messages import EngineRequest, RequestDelta
from pagewick.engine.scheduling.scheduler import Scheduler
from pagewick.models.blocks import SequentialBlock

# First tokens of prompts that change how the engine behaves, until the process ends; SLOW ends when there is no work.
LOOP, DEADLOCK, SLOW, RAISE = 180, 181, 182, 183
SLOW_LAYER_S = 0.15

_asked: set[int] = set()


def _install() -> None:
    add, step, schedule, forward = Engine.add, Engine.step, Scheduler.schedule, SequentialBlock.forward

    def odd_add(self: Engine, request: EngineRequest) -> None:
        _asked.add(request.prompt_token_ids[0])
        add(self, request)

    def odd_step(self: Engine) -> list[RequestDelta]:
        deltas = step(self)
        if not self.has_work:
            _asked.clear()
        return deltas

    def odd_schedule(self: Scheduler) -> Any:
        while LOOP in _asked:
            pass
        if DEADLOCK in _asked:
            threading.Semaphore(0).acquire()
        if RAISE in _asked:
            raise RuntimeError("secret words from /home/somebody")
        return schedule(self)

    def odd_forward(self: SequentialBlock, *given: Any) -> Any:
        if SLOW in _asked:
            time.sleep(SLOW_LAYER_S)
        return forward(self, *given)

    Engine.add, Engine.step = odd_add, odd_step  # type: ignore[method-assign]
    Scheduler.schedule, SequentialBlock.forward = odd_schedule, odd_forward  # type: ignore[method-assign]


if __name__ == "__main__":
    _install()
    sys.exit(engine_process.main(int(sys.argv[1]), int(sys.argv[2])))
