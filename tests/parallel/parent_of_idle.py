"""A rank 0 that starts two idle ranks and hangs. Usage: python -m tests.parallel.parent_of_idle FOLDER"""

from __future__ import annotations

import sys
import time

from pagewick.parallel.launch import LocalRanks
from pagewick.parallel.topology import detect_topology

if __name__ == "__main__":
    topology = detect_topology({}, tensor_parallel_size=3)
    with LocalRanks(topology, module="tests.parallel.idle_worker", arguments=[sys.argv[1], "sleep"]):
        time.sleep(600)
