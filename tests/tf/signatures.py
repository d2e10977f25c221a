"""List the public functions and other names of namespaces: `python signatures.py MODULE NAMESPACES RESULTS`.

NAMESPACES is a JSON file with a list of namespaces, such as "nn" or, for the module itself, "". RESULTS becomes a JSON
object: for each namespace its names, with the names of the parameters of functions.
"""

import importlib
import inspect
import json
import operator
import pathlib
import sys


def signatures(module, space):
    namespace = operator.attrgetter(space)(module) if space else module
    # `replicax.tf` has names beside those of its tables, which have tests of their own.
    for name in module._names.names(space) if sys.argv[1] == "replicax.tf" else dir(namespace):
        value = getattr(namespace, name)
        if name.startswith("_") or inspect.ismodule(value):
            continue
        try:
            parameters = list(inspect.signature(value).parameters)
        except (TypeError, ValueError):
            parameters = None
        yield name, parameters if callable(value) and not inspect.isclass(value) else None


def main():
    module = importlib.import_module(sys.argv[1])
    spaces = json.loads(pathlib.Path(sys.argv[2]).read_text(encoding="utf-8"))
    found = {space: dict(signatures(module, space)) for space in spaces}
    pathlib.Path(sys.argv[3]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
