"""How a side answers its driver: each line in is a request, each line out its answer, in JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Answering = Callable[[dict[str, Any]], dict[str, Any]]


def serve(start: Callable[[], Answering]) -> None:
    """Starts, and answers until there are no more requests. What libraries print, in C++ too, goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer = start()
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=out, flush=True)


def task() -> tuple[int, list[str]]:
    """Which worker this is, and the addresses of all; 0 and none where there is one process."""
    config = json.loads(os.environ.get("TF_CONFIG", "{}"))
    return (config["task"]["index"], config["cluster"]["worker"]) if config else (0, [])
