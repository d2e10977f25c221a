"""Runs the programs of facts.json on replicax.tf, each in a namespace of its own, and prints what they print as JSON.

python run_facts.py FACTS_JSON OUTPUT_JSON NUMBERS

NUMBERS is a JSON list of the numbers of the facts.
"""

import contextlib
import io
import json
import linecache
import os
import re
import sys
import tempfile
import warnings
from unittest import mock

import numpy as np

import replicax.tf as tf

# The programs were observed without these.
ABSENT = ("kubernetes", "googleapiclient")


def run(number, preamble, program):
    """What one program prints."""
    sys.modules["tensorflow"] = tf
    sys.modules.update(dict.fromkeys(ABSENT))  # importing them is an ImportError
    namespace = {"__name__": "__main__", "tf": tf, "np": np}
    out = io.StringIO()
    with contextlib.redirect_stdout(out), warnings.catch_warnings(), mock.patch.dict(os.environ):
        warnings.simplefilter("ignore")
        np.random.seed(0)
        for part, source in (("preamble", preamble), ("program", program)):
            name = f"<{part} of fact {number}>"
            linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
            try:
                exec(compile(source, name, "exec", dont_inherit=True), namespace)
            except Exception as error:
                print(f"(the program ended with {type(error).__name__}: {str(error)[:400]})")
    with contextlib.suppress(RuntimeError):
        tf.distribute.experimental_set_strategy(None)
    printed = re.sub(r" at 0x[0-9a-f]+", " at 0x...", out.getvalue())
    return re.sub(r"localhost:\d{4,5}", "localhost:PORT", printed)


def main(facts_file, output_file, numbers):
    os.environ.pop("REPLICAX_VIRTUAL_DEVICES", None)
    with open(facts_file) as f:
        facts = json.load(f)
    wanted = [fact for fact in facts["facts"] if fact["number"] in json.loads(numbers)]
    results = {}
    for fact in wanted:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["HELDOUT_TMP"] = folder
            results[str(fact["number"])] = run(fact["number"], facts["preamble"], fact["program"])
    with open(output_file, "w") as f:
        json.dump(results, f)


if __name__ == "__main__":
    main(*sys.argv[1:])
