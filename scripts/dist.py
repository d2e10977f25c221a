"""Builds the sdist and the wheel into `dist`, and checks them as somebody who installs replicax would meet them.

    python scripts/dist.py                            only the files
    python scripts/dist.py python3.11=jax==0.10.2 python3.13
                                                      and installs the wheel on these, with this or the newest JAX

`make dist` runs it with the oldest and the newest supported Python. It needs git, and `build`, `twine` and
`readme_renderer[md]` where it runs. REPLICAX_HOME and REPLICAX_DOCS say where the project lives (see hatch_build.py).
"""

from __future__ import annotations

import email
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterable
from email.message import Message
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "site")]

import links  # noqa: E402

from replicax._base import doc_pages  # noqa: E402

DIST = ROOT / "dist"
NOT_IN_SDIST = (".ci/", ".github/")

# Programs that need an extra, and say how to install it where it is missing. Programs import Optax and Flax themselves.
TF = "import replicax.tf as tf\n"
NEEDS = {
    "autograph": "import jax, replicax as rx; rx.function(lambda x: 1 if x else 2, autograph=True)(jax.numpy.ones(()))",
    "checkpoint": "import replicax as rx; rx.train.Checkpoint(v=rx.Variable(1.0)).save('checkpoint')",
    "data": TF + "tf.train.Example()",
    "gce": "import replicax as rx; rx.cluster_resolver.GCEClusterResolver('p', 'z', 'g', 1).cluster_spec()",
    "gfile": TF + "tf.io.gfile.exists('gs://bucket/file')",
    "image": TF + "tf.io.decode_jpeg(tf.io.encode_jpeg(tf.zeros([8, 8, 3], tf.uint8)))",
    "keras": TF + "tf.keras.layers.Dense(1)",
    "kubernetes": "import replicax as rx; rx.cluster_resolver.KubernetesClusterResolver().cluster_spec()",
    "plan": "import jax, replicax as rx; rx.plan(jax.jit(lambda x: x), 1.0, topology='cpu:2')",
    "ps": "import replicax as rx; rx.experimental.rpc.Server.create('grpc', 'localhost:0').start()",
    "summary": TF + "with tf.summary.create_file_writer('s').as_default(): tf.summary.scalar('a', 1.0, step=0)",
}


class Failure(Exception):
    """A check that did not pass."""


def step(name: str, check: Callable[..., str], *arguments: object) -> None:
    """Runs a check and prints a line about it: what it found, and how long it took."""
    start = time.monotonic()
    try:
        found = check(*arguments)
    except Failure as error:
        print(f"FAILED  {name}: {error}", flush=True)
        raise SystemExit(1) from None
    print(f"ok      {name}: {found} ({time.monotonic() - start:.0f} s)", flush=True)


def run(*command: object, cwd: Path = ROOT, timeout: float = 900, may_fail: bool = False, **environment: str) -> str:
    """Runs a command and returns its output; a `Failure` has the output of a command that fails."""
    line = [str(part) for part in command]
    # Without the user's own modules: only what is installed counts.
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT if may_fail else subprocess.PIPE}
    try:
        done = subprocess.run(line, cwd=cwd, env=inherited | environment, text=True, timeout=timeout, **pipes)
    except subprocess.TimeoutExpired:
        raise Failure(f"`{' '.join(line)}` took more than {timeout:.0f} s") from None
    if done.returncode and not may_fail:
        raise Failure(f"`{' '.join(line)}` ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def require_equal(what: str, found: Iterable[str], expected: Iterable[str]) -> None:
    """Raises `Failure` unless two sets of names are equal, naming the first that are not in both."""
    found, expected = set(found), set(expected)
    differences = [f"missing: {', '.join(sorted(expected - found)[:10])}"] if expected - found else []
    differences += [f"not expected: {', '.join(sorted(found - expected)[:10])}"] if found - expected else []
    if differences:
        raise Failure(f"{what}; " + "; ".join(differences))


def build(folder: Path) -> tuple[Path, Path]:
    """Builds the sdist, and the wheel from it, and returns their paths."""
    epoch = run("git", "log", "-1", "--format=%ct").strip()
    run(sys.executable, "-m", "build", "--outdir", folder, SOURCE_DATE_EPOCH=epoch)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def check_build() -> str:
    shutil.rmtree(DIST, ignore_errors=True)
    return " and ".join(f"{path.name} ({path.stat().st_size / 1000:,.0f} kB)" for path in build(DIST))


def check_reproducible(*paths: Path) -> str:
    with tempfile.TemporaryDirectory() as folder:
        for first, second in zip(paths, build(Path(folder)), strict=True):
            if first.read_bytes() != second.read_bytes():
                raise Failure(f"{first.name} has other bytes when it is built again")
    return "a second build has the same bytes, " + ", ".join(
        f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}" for path in paths
    )


def check_sdist(sdist: Path) -> str:
    """The sdist has what git tracks, without what only the repository needs."""
    tracked = run("git", "ls-files", "-z").strip("\0").split("\0")
    with tarfile.open(sdist) as archive:
        files = [member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()]
    expected = [name for name in tracked if not name.startswith(NOT_IN_SDIST)]
    require_equal("the files of the sdist are not those of git", files, [*expected, "PKG-INFO"])
    return f"{len(files)} files, those that git tracks"


def wheel_files(source: Path) -> set[str]:
    """Returns the files that a wheel of a source tree has, without those about the package."""
    package = source / "src"
    code = [*package.rglob("*.py"), package / "replicax/py.typed"]
    files = {path.relative_to(package).as_posix() for path in code}
    # Messages name pages of the documentation, which are therefore installed too.
    pages = [path for path in (source / "docs").rglob("*") if path.is_file()]
    return files | {f"replicax/{path.relative_to(source).as_posix()}" for path in pages}


def check_wheel(wheel: Path, source: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    about = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"
    own = {f"{about}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")}
    require_equal("the files of the wheel are not those of the package", names, wheel_files(source) | own)
    pages = sum(name.startswith("replicax/docs/") for name in names)
    return f"{len(names)} files, with py.typed, {pages} of the documentation and the licence"


def metadata_of(wheel: Path) -> Message:
    """Returns the metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_string(archive.read(name).decode())


def check_metadata(sdist: Path, wheel: Path) -> str:
    run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    metadata = metadata_of(wheel)
    if metadata["Requires-Python"] != project["requires-python"]:
        raise Failure(f"Requires-Python is {metadata['Requires-Python']}, not {project['requires-python']}")
    extras = [name.replace("_", "-") for name in project["optional-dependencies"]]
    require_equal("the extras differ from pyproject.toml's", metadata.get_all("Provides-Extra", []), extras)
    require_equal(
        "the classifiers differ from pyproject.toml's", metadata.get_all("Classifier"), project["classifiers"]
    )
    if "Dynamic" in metadata:
        raise Failure(f"nothing filled in {', '.join(metadata.get_all('Dynamic', []))}")
    links = [link.partition(",")[0] for link in metadata.get_all("Project-URL", [])]
    return (
        f"version {metadata['Version']}, Python {metadata['Requires-Python']}, {len(extras)} extras, "
        f"links: {', '.join(links) or 'none, since REPLICAX_HOME is not set'}"
    )


def check_readme(wheel: Path, source: Path) -> str:
    """The README renders as on the package index, and each of its links leads to something that exists."""
    from readme_renderer import markdown

    metadata = metadata_of(wheel)
    rendered = markdown.render(metadata.get_payload())
    if rendered is None:
        raise Failure("README.md does not render")
    page = links.Page(rendered)
    home, docs = (os.environ.get(name, "").rstrip("/") for name in ("REPLICAX_HOME", "REPLICAX_DOCS"))
    elsewhere = []
    for address in page.links:
        path, _, anchor = address.partition("#")
        if not path:
            if anchor not in page.anchors:
                raise Failure(f"README.md has no heading for the link #{anchor}")
        elif docs and path.startswith(f"{docs}/"):
            name = re.sub(r"^[^/]+/(.*)\.html$", r"docs/\1.md", path.removeprefix(f"{docs}/"))
            require_page(source / name, anchor)
        elif home and path.startswith((f"{home}/blob/", f"{home}/raw/")):
            name = path.removeprefix(f"{home}/").split("/", 2)[2]
            require_page(source / name, anchor)
        elif re.match("[a-z]+:", path):
            elsewhere.append(address)
        else:
            raise Failure(f"the link {address} in README.md leads nowhere on the package index")
    return f"renders; {len(page.links)} links, {len(elsewhere)} of them to other sites (not followed)"


def require_page(path: Path, anchor: str) -> None:
    """Raises `Failure` unless a file exists and has the heading that a link names."""
    if not path.exists():
        raise Failure(f"README.md links to {path.name}, and the sdist has no such file")
    if anchor and path.suffix == ".md":
        headings = doc_pages.headings(path.read_text(encoding="utf-8"))
        if anchor not in {doc_pages.anchor(title) for _, _, title in headings}:
            raise Failure(f"README.md links to #{anchor} of {path.name}, which has no such heading")


def check_installed(interpreter: str, jax: str, wheel: Path, source: Path) -> str:
    """Installs the wheel in a new environment and uses it as a reader of the README does."""
    version = run(interpreter, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
    environment = ROOT / f".venv-dist-{version}"
    python, command = (environment / "bin" / name for name in ("python", "replicax"))
    run(interpreter, "-m", "venv", "--clear", environment)
    pip = (python, "-m", "pip", "--disable-pip-version-check", "--quiet")
    wanted = [jax] if jax else []
    run(*pip, "install", f"replicax[examples] @ {wheel.as_uri()}", *wanted, timeout=1800)
    run(*pip, "check")
    with tempfile.TemporaryDirectory() as folder:  # away from the sources
        elsewhere = Path(folder)
        program = "import jax, replicax as rx; print(rx.MirroredStrategy.__name__, rx.__version__, jax.__version__)"
        name, own, found = run(python, "-c", program, cwd=elsewhere).split()
        said = run(command, "--version", cwd=elsewhere).strip()
        if (name, said) != ("MirroredStrategy", f"replicax {own}") or own != metadata_of(wheel)["Version"]:
            raise Failure(f"`import replicax` has version {own}, `replicax --version` says {said}")
        demo = source / "examples/digits.py"
        output = run(python, demo, "--epochs", "1", "--output", elsewhere / "digits.png", cwd=elsewhere)
        if not (elsewhere / "digits.png").is_file() or "Test accuracy" not in output:
            raise Failure(f"the demo drew nothing:\n{output}")
        known = json.loads(run(command, "info", "--json", cwd=elsewhere))
        missing = {extra for extra, state in known["extras"].items() if state["missing"]}
        if not known["ok"] or known["versions"]["replicax"] != own or not missing >= NEEDS.keys():
            raise Failure(f"`replicax info` says {known}")
        hints = [check_hint(python, extra, program, elsewhere) for extra, program in NEEDS.items()]
    # Each extra's libraries exist for this Python and go together; they are not downloaded where the index allows.
    run(*pip, "install", "--dry-run", f"replicax[all] @ {wheel.as_uri()}", *wanted, timeout=1800)
    result = output.splitlines()[-1].partition(";")[0]
    return f"JAX {found}; import, command, info, `pip check`, {len(hints)} hints, all extras; demo: {result}"


def check_hint(python: Path, extra: str, program: str, folder: Path) -> str:
    """Checks that a program says how to install the extra that it needs, and returns that."""
    path = folder / f"needs_{extra}.py"
    path.write_text(program, encoding="utf-8")
    said = run(python, path, cwd=folder, may_fail=True)
    hint = re.search(rf"pip install (.*) \(replicax's extra '{extra}'\)|pip install {extra}", said)
    if hint is None:
        raise Failure(f"without the extra {extra!r}, `{program}` says:\n{said}")
    return hint[0]


def main(interpreters: list[str]) -> None:
    step("build", check_build)
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    step("reproducible", check_reproducible, sdist, wheel)
    step("contents of the sdist", check_sdist, sdist)
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        (source,) = Path(folder).iterdir()
        step("contents of the wheel", check_wheel, wheel, source)
        step("metadata", check_metadata, sdist, wheel)
        step("README", check_readme, wheel, source)
        for argument in interpreters:
            interpreter, _, jax = argument.partition("=")
            step(f"installed on {Path(interpreter).name}", check_installed, interpreter, jax, wheel, source)
    print(f"{sdist.name} and {wheel.name} are in {DIST.name}.")


if __name__ == "__main__":
    main(sys.argv[1:])
