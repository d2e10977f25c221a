"""Runs the tests of a library for TensorFlow under TensorFlow and under replicax, and compares them test by test.

    python scripts/library_tests.py LIBRARY --tensorflow PYTHON --results FOLDER

LIBRARY is a folder with the library's package in it, such as an unpacked wheel; PYTHON is an interpreter that has
TensorFlow. The interpreter that runs the script is the one of replicax. Each file of tests runs in a process of its
own, first under TensorFlow, then under `replicax run-tf`. What each test did is kept in FOLDER, one JSON file for each
file of tests and side. A second call runs only what has no results yet; `--again` runs more.

The table counts, for each file, the tests that pass under TensorFlow and those of them that pass under replicax. Below
it are the tests that do not, grouped by their error.
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import importlib
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import traceback
import unittest
from pathlib import Path

PASSED, FAILED, SKIPPED, NOT_RUN = "passed", "failed", "skipped", "not run"
Outcomes = dict[str, dict[str, object]]


# In the process that runs one file of tests: it has no names of this project, since it also runs under TensorFlow.


class _Recorder(unittest.TestResult):
    """Writes a line of JSON for each test when it ends, so that the lines of those before a crash are there."""

    def __init__(self, path: str):
        super().__init__()
        self._path = path
        self._found: dict[str, object] = {}
        self._begun = 0.0

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._found, self._begun = {"outcome": PASSED}, time.process_time()

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        self._write(_name(test), {**self._found, "cpu": round(time.process_time() - self._begun, 3)})

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._found = {"outcome": SKIPPED, "error": reason}

    def addError(self, test: unittest.TestCase, err) -> None:
        text = "".join(traceback.format_exception_only(*err[:2])).strip()
        found = {"outcome": FAILED, "error": text, "traceback": "".join(traceback.format_exception(*err))[-6000:]}
        if isinstance(test, unittest.TestCase):
            self._found = found
        else:  # of setUpClass: the tests of the class do not run
            self._write(_name(test), found)

    def addFailure(self, test: unittest.TestCase, err) -> None:
        self.addError(test, err)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err) -> None:
        if err is not None:
            self.addError(test, err)

    def _write(self, name: str, found: dict[str, object]) -> None:
        with Path(self._path).open("a") as file:
            file.write(json.dumps({"test": name, **found}) + "\n")


def _name(test: unittest.TestCase) -> str:
    return test.id().partition(" (")[0]  # absl adds the parameters, which print in another way here


def _cases(suite):
    for part in suite:
        yield from _cases(part) if isinstance(part, unittest.TestSuite) else [part]


def run_module(module: str, path: str, only: list[str]) -> None:
    """Runs the tests of a module, all or those with these names, and writes what each did to a file."""
    from absl import flags

    found = unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module(module))
    flags.FLAGS([sys.argv[0]])
    wanted = [test for test in _cases(found) if not only or _name(test) in only]
    unittest.TestSuite(wanted).run(_Recorder(path))


# In the process that starts the others.


def run_file(command: list[str], module: str, environment: dict[str, str], limit: float, only: list[str]) -> Outcomes:
    """Runs a module's tests in a process, and returns what each test did; "" is the process as a whole."""
    with tempfile.TemporaryDirectory() as folder:
        lines, names = Path(folder, "lines"), Path(folder, "names")
        lines.touch()
        names.write_text("\n".join(only))
        begun, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        inside = [str(Path(__file__).resolve()), "--inside", module, str(lines), str(names)]
        with Path(folder, "output").open("w+") as output:
            try:
                done = subprocess.run(
                    [*command, *inside],
                    env={**os.environ, **environment},
                    cwd=folder,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=limit,
                    stdin=subprocess.DEVNULL,
                )
                status = f"exit status {done.returncode}"
            except subprocess.TimeoutExpired:
                status = f"stopped after {limit:.0f} s"
            output.seek(max(0, output.tell() - 6000))
            text = output.read()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
        outcomes = {line.pop("test"): line for line in map(json.loads, lines.read_text().splitlines())}
    process = {"outcome": status, "wall": round(time.monotonic() - begun, 1), "cpu": round(cpu, 1)}
    return {**outcomes, "": {**process, "output": "" if status == "exit status 0" else text}}


def reasons(outcome: dict[str, object] | None, process: dict[str, object]) -> str:
    """Returns a short text for what happened to a test that did not pass, the same for tests of one cause."""
    if outcome is None:
        return f"not run: {process['outcome']}, {str(process['output']).strip().splitlines()[-1:]}"
    first = str(outcome.get("error") or outcome["outcome"]).strip().splitlines()[0]
    first = re.sub(r"0x[0-9a-f]+|\d+(\.\d+)?(e[-+]\d+)?", "N", first)
    return first[:160]


class Comparison:
    """The results of a library's files of tests under both."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.library = Path(options.library).resolve()
        self.results = Path(options.results).resolve()
        found = sorted(self.library.glob(options.pattern))
        self.modules = [".".join(path.relative_to(self.library).with_suffix("").parts) for path in found]
        if options.only:
            self.modules = [name for name in self.modules if any(fnmatch.fnmatch(name, p) for p in options.only)]

    def stored(self, side: str, module: str) -> Path:
        return self.results / side / f"{module}.json"

    def load(self, side: str, module: str) -> Outcomes | None:
        path = self.stored(side, module)
        return json.loads(path.read_text()) if path.exists() else None

    def run(self, side: str, module: str, command: list[str], only: list[str]) -> None:
        paths = [str(self.library), *self.options.path]
        if side == "replicax":
            paths += [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
        environment = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths)), "TF_CPP_MIN_LOG_LEVEL": "3"}
        before = (self.load(side, module) or {}) if only else {}
        found = {**before, **run_file(command, module, environment, self.options.limit, only)}
        path = self.stored(side, module)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1, sort_keys=True))
        passed = sum(outcome["outcome"] == PASSED for outcome in found.values())
        process = found[""]
        print(f"{side:10} {module}: {passed} passed, {process['outcome']}, {process['cpu']} s of CPU", flush=True)

    def failing(self, module: str) -> list[str]:
        """Returns the tests of a module that pass under TensorFlow and did not pass here."""
        theirs, ours = self.load("tensorflow", module) or {}, self.load("replicax", module) or {}
        passed = [name for name, outcome in theirs.items() if outcome["outcome"] == PASSED]
        return [name for name in passed if ours.get(name, {}).get("outcome") != PASSED]

    def run_all(self) -> None:
        for module in self.modules:
            if self.options.tensorflow and self.load("tensorflow", module) is None:
                self.run("tensorflow", module, [self.options.tensorflow], [])
            failing = self.failing(module)
            known = self.load("replicax", module) is not None
            if not known or self.options.again == "all" or (self.options.again == "failing" and failing):
                only = failing if known and self.options.again == "failing" else []
                self.run("replicax", module, [sys.executable, "-m", "replicax.tf"], only)

    def show(self) -> None:
        rest: dict[str, list[str]] = collections.defaultdict(list)
        total = [0, 0]
        print("\n| file | pass under TensorFlow | of these, pass here |\n|---|---|---|")
        for module in self.modules:
            theirs, ours = self.load("tensorflow", module) or {}, self.load("replicax", module)
            passed = [name for name, outcome in theirs.items() if outcome["outcome"] == PASSED]
            failing = self.failing(module)
            total = [total[0] + len(passed), total[1] + len(passed) - len(failing)]
            print(f"| {module} | {len(passed)} | {len(passed) - len(failing)} |")
            for name in failing:
                process = (ours or {}).get("", {"outcome": NOT_RUN, "output": ""})
                rest[reasons((ours or {}).get(name), process)].append(name)
        share = 100 * total[1] / total[0] if total[0] else 0
        print(f"| all ({share:.1f} %) | {total[0]} | {total[1]} |\n")
        for reason, names in sorted(rest.items(), key=lambda item: -len(item[1])):
            print(f"{len(names)} x {reason}")
            for name in names if self.options.names else names[:2]:
                print(f"      {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", help="the folder with the library's package")
    parser.add_argument("--pattern", default="**/*_test.py", help="the files of tests, in the folder")
    parser.add_argument("--only", action="append", help="a pattern of modules, such as '*.linear_test'; repeatable")
    parser.add_argument("--tensorflow", help="an interpreter with TensorFlow; without it stored results are used")
    parser.add_argument("--results", required=True, help="the folder in which results are kept")
    parser.add_argument("--path", action="append", default=[], help="a folder with what the library needs; repeatable")
    parser.add_argument("--again", choices=["none", "failing", "all"], default="none", help="what runs again here")
    parser.add_argument("--limit", type=float, default=900, help="seconds for a file of tests")
    parser.add_argument("--names", action="store_true", help="list all tests of each error")
    comparison = Comparison(parser.parse_args())
    comparison.run_all()
    comparison.show()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        module, path, names = sys.argv[2:]
        run_module(module, path, Path(names).read_text().split("\n") if Path(names).read_text() else [])
    else:
        main()
