"""Exit with 0 if the server of this container serves requests, else with 1: what Docker calls healthy."""

import os
import sys
import urllib.error
import urllib.request

port = os.environ.get("PAGEWICK_PORT") or os.environ.get("PORT") or "8000"
try:
    urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=4).close()
except (OSError, ValueError) as error:
    print(error, file=sys.stderr)
    sys.exit(1)
