"""`replicax.tf` has every name of `tf.distribute` and what belongs to it, with TensorFlow's parameters.

tensorflow_api.json has TensorFlow 2.21's: for each name the names of its parameters, and for each class its public
members with theirs; a member without parameters is an attribute.
"""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).parent


def test_every_name_is_there_and_takes_tensorflows_parameters(run_python):
    done = run_python(f"""
import functools, inspect, json
import replicax.tf as tf

def fault(name, candidate, expected):
    if expected is None or isinstance(candidate, property):
        return []
    try:
        parameters = inspect.signature(candidate).parameters.values()
    except (TypeError, ValueError):  # of a function that is not written in Python
        return []
    any_more = any(one.kind is one.VAR_KEYWORD for one in parameters)
    have = [one for one in parameters if one.name != "self" and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    first, more = have[: len(expected)], have[len(expected) :]
    same = [one.name for one in first] == expected
    optional = all(one.default is not one.empty for one in more)
    fine = any_more or (same and optional)
    return [] if fine else [f"{{name}} takes {{[one.name for one in have]}}, not {{expected}}"]

faults, count = [], 0
for name, entry in json.loads(open({str(HERE / "tensorflow_api.json")!r}).read()).items():
    try:
        found = functools.reduce(getattr, name.split(".")[1:], tf)
    except AttributeError:
        faults.append(f"{{name}} is missing")
        continue
    count += 1
    faults += fault(name, found, entry.get("call"))
    for member, expected in entry.get("members", {{}}).items():
        static = inspect.getattr_static(found, member, None)
        if static is None and not hasattr(found, member):
            faults.append(f"{{name}}.{{member}} is missing")
            continue
        count += 1
        value = static if isinstance(static, property) else getattr(found, member)
        faults += fault(f"{{name}}.{{member}}", value, expected)
print(json.dumps([count, faults]))
""")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [1028, []]
