"""What a release is made of: its metadata, its packages, the workflows of the forge, and the published site."""

from __future__ import annotations

import doctest
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
import types
import zipfile
from pathlib import Path

import pytest
import yaml
from test_repository import anchors

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def load(path: str) -> types.ModuleType:
    """Imports a file of the repository that is in no package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hatch_build = load("hatch_build.py")
dist = load("scripts/dist.py")
publish_docs = load("scripts/publish_docs.py")
release_notes = load("scripts/release_notes.py")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=180)
    (found,) = folder.glob("*.whl")
    return found


# The version


def test_the_version_is_the_same_everywhere(wheel):
    import replicax

    version = replicax.__version__
    assert dist.metadata_of(wheel)["Version"] == version == release_notes.version()
    assert "version" in PROJECT["dynamic"]
    if "dev" not in version:
        assert release_notes.cited() == (version, release_notes.sections()[version][0])


def repository(folder: Path, changelog: str, version="1.2.0", cited='version: "1.2.0"\ndate-released: "2030-01-31"\n'):
    """A repository with the files that a release is checked by."""
    path = folder / release_notes.VERSION_FILE
    path.parent.mkdir(parents=True)
    path.write_text(f'__version__ = "{version}"\n')
    (folder / "CHANGELOG.md").write_text(changelog)
    (folder / "CITATION.cff").write_text(cited)
    return folder


OLD = "## [1.1.0] - 2029-12-01\n\n- Old.\n"
CHANGELOG = f"# Changelog\n\n## [Unreleased]\n\n## [1.2.0] - 2030-01-31\n\n- News.\n\n{OLD}"


def test_the_notes_of_a_release_are_its_section_of_the_changelog(tmp_path):
    assert release_notes.notes("v1.2.0", repository(tmp_path, CHANGELOG)) == "- News."


@pytest.mark.parametrize(
    "tag, changes, message",
    [
        ("v1.3.0", {}, "the tag is v1.3.0, and the version in .*: expected the tag v1.2.0"),
        ("v1.2.0", {"changelog": OLD}, "says nothing about 1.2.0: add a section with the heading"),
        ("v1.2.0", {"changelog": "## [1.2.0]\n\n- News.\n"}, "needs a date"),
        ("v1.2.0", {"changelog": CHANGELOG.replace("## [1.2", "- More.\n\n## [1.2")}, r"entries under \[Unreleased\]"),
        ("v1.2.0", {"cited": "version: 1.1.0\ndate-released: 2029-12-01\n"}, "CITATION.cff has version and date"),
    ],
)
def test_a_tag_that_does_not_agree_with_the_files_is_refused(tmp_path, tag, changes, message):
    root = repository(tmp_path, **({"changelog": CHANGELOG} | changes))
    with pytest.raises(ValueError, match=message):
        release_notes.notes(tag, root)


# The packages


def test_the_wheel_has_the_package_and_nothing_else(wheel):
    assert "py.typed" in dist.check_wheel(wheel, ROOT)


def test_a_wheel_with_a_file_too_many_or_too_few_is_refused(wheel, tmp_path):
    more = tmp_path / wheel.name
    more.write_bytes(wheel.read_bytes())
    with zipfile.ZipFile(more, "a") as archive:
        archive.writestr("tests/test_it.py", "")
    with pytest.raises(dist.Failure, match=r"not expected: tests/test_it\.py"):
        dist.check_wheel(more, ROOT)
    fewer = tmp_path / "fewer" / wheel.name
    fewer.parent.mkdir()
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(fewer, "w") as archive:
        for name in source.namelist():
            if name != "replicax/py.typed":
                archive.writestr(name, source.read(name))
    with pytest.raises(dist.Failure, match=r"missing: replicax/py\.typed"):
        dist.check_wheel(fewer, ROOT)


def test_a_failed_check_ends_with_a_line_and_a_status(capsys):
    def check():
        raise dist.Failure("the reason")

    with pytest.raises(SystemExit) as ended:
        dist.step("metadata", check)
    assert ended.value.code == 1 and capsys.readouterr().out == "FAILED  metadata: the reason\n"
    with pytest.raises(dist.Failure, match=r"(?s)ended with status 3:.*out.*err"):
        program = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
        dist.run(sys.executable, "-c", program)


def test_the_oldest_jax_of_the_metadata_is_the_one_that_is_tested():
    (required,) = (name for name in PROJECT["dependencies"] if name.startswith("jax"))
    assert f"JAX_OLDEST ?= {required.replace('>=', '==')}\n" in MAKEFILE


# The links of the package


PLACE = {"home": "https://forge.example/rx", "docs": "https://rx.example", "version": "1.2.0"}
NOWHERE = {"home": "", "docs": "", "version": "1.2.0"}


def test_the_examples_of_the_build_hook_run():
    failed, tried = doctest.testmod(hatch_build)
    assert tried >= 6 and not failed


@pytest.mark.parametrize(
    "text, there, nowhere",
    [
        ("[a](LICENSE)", "[a](https://forge.example/rx/blob/v1.2.0/LICENSE)", "a"),
        ("[a\nb](docs/x/y.md#z)", "[a\nb](https://rx.example/1.2.0/x/y.html#z)", "a\nb"),
        ("[b](#c)", "[b](#c)", "[b](#c)"),
        ("[`a[0]`](x.py)", "[`a[0]`](https://forge.example/rx/blob/v1.2.0/x.py)", "`a[0]`"),
        ("[a](https://x.example)", "[a](https://x.example)", "[a](https://x.example)"),
        ("![a](p.svg)", "![a](https://forge.example/rx/raw/v1.2.0/p.svg)", ""),
        (
            "[![a](p.svg)](x)",
            "[![a](https://forge.example/rx/raw/v1.2.0/p.svg)](https://forge.example/rx/blob/v1.2.0/x)",
            "",
        ),
        ('<img src="p.svg" alt="a">', '<img src="https://forge.example/rx/raw/v1.2.0/p.svg" alt="a">', ""),
        ('<a href="x">a</a>', '<a href="https://forge.example/rx/blob/v1.2.0/x">a</a>', "a"),
        ("```py\n[a](b)\n```\n`[a](b)`", "```py\n[a](b)\n```\n`[a](b)`", "```py\n[a](b)\n```\n`[a](b)`"),
    ],
)
def test_links_of_the_readme_work_outside_of_the_repository(text, there, nowhere):
    assert hatch_build.standalone(text, **PLACE) == there
    assert hatch_build.standalone(text, **NOWHERE) == nowhere


def test_a_version_in_development_links_to_the_newest_files():
    text = hatch_build.standalone("[a](docs/b.md) [c](d)", **PLACE | {"version": "1.3.0.dev0"})
    assert text == "[a](https://rx.example/dev/b.html) [c](https://forge.example/rx/blob/HEAD/d)"


@pytest.mark.parametrize("place", [PLACE, PLACE | {"docs": ""}, NOWHERE], ids=["site", "forge", "nowhere"])
def test_every_link_of_the_readme_leads_to_a_file(place):
    text = hatch_build.standalone((ROOT / "README.md").read_text(encoding="utf-8"), **place)
    text = re.sub(r"^```.*?^```|`[^`\n]+`", "", text, flags=re.MULTILINE | re.DOTALL)
    found = 0
    for address in re.findall(r"\]\(([^)\s]+)\)|\b(?:href|src|srcset)=\"([^\"]+)\"", text):
        address = "".join(address).partition("#")[0]
        assert not address or address.startswith("https://"), f"{address} leads nowhere outside of the repository"
        if place["docs"] and address.startswith(place["docs"]):
            path = address.removeprefix("https://rx.example/1.2.0/").replace(".html", ".md")
            assert (ROOT / "docs" / path).is_file(), f"the site has no page {path}"
        elif place["home"] and address.startswith(place["home"]):
            path = re.sub(r"https://forge.example/rx/(blob|raw)/v1.2.0/", "", address)
            assert (ROOT / path).exists(), f"there is no file {path}"
        else:
            continue
        found += 1
    assert bool(found) == bool(place["home"])


@pytest.mark.parametrize("name", sorted(path.name for path in ROOT.glob("*.md")))
def test_links_of_the_pages_at_the_top_lead_to_files_and_sections(name):
    text = re.sub(r"^```.*?^```|`[^`\n]+`", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.M | re.S)
    for address in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = address.partition("#")
        if not path.startswith("https://"):
            page = ROOT / (path or name)
            assert page.exists(), f"there is no {path}"
            assert not anchor or anchor in anchors(page), f"{path} has no section {anchor}"


def test_the_package_has_the_links_that_the_environment_says(monkeypatch):
    def made():
        metadata = {"version": "1.2.0"}
        hatch_build.MetadataHook(str(ROOT), {}).update(metadata)
        return metadata

    monkeypatch.setenv("REPLICAX_HOME", "https://forge.example/rx/")
    monkeypatch.setenv("REPLICAX_DOCS", "https://rx.example/")
    assert made()["urls"] == {
        "Homepage": "https://rx.example",
        "Documentation": "https://rx.example",
        "Source": "https://forge.example/rx",
        "Issues": "https://forge.example/rx/issues",
        "Changelog": "https://forge.example/rx/blob/v1.2.0/CHANGELOG.md",
    }
    assert "https://forge.example/rx/blob/v1.2.0/LICENSE" in made()["readme"]["text"]
    monkeypatch.delenv("REPLICAX_HOME")
    monkeypatch.delenv("REPLICAX_DOCS")
    assert made()["urls"] == {}


# The workflows of the forge


FORGE = ROOT / ".github"
WORKFLOWS = {
    path.name: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(FORGE.glob("workflows/*.yml"))
}
JOBS = {(name, job): content for name, workflow in WORKFLOWS.items() for job, content in workflow["jobs"].items()}
STEPS = [step for job in JOBS.values() for step in job.get("steps", ())]


def test_workflows_call_make_targets_and_scripts_that_are_there():
    commands = "\n".join(step["run"] for step in STEPS if "run" in step)
    targets = set(re.findall(r"\bmake ([\w-]+)", commands))
    scripts = set(re.findall(r"python (scripts/\S+)", commands))
    assert {"lint", "test-python", "docs", "dist"} <= targets and len(scripts) == 2
    missing = targets - set(re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE))
    assert not missing, f"The Makefile has no target {missing}"
    assert all((ROOT / script).is_file() for script in scripts)
    called = {job["uses"] for job in JOBS.values() if "uses" in job}
    assert called and all((ROOT / path).is_file() for path in called)


def test_the_pythons_that_are_tested_are_those_that_the_package_declares():
    declared = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    matrix = JOBS["test.yml", "test"]["strategy"]["matrix"]
    assert matrix["python"] == declared and PROJECT["requires-python"] == f">={declared[0]}"
    assert {name.partition("-")[0] for name in matrix["os"]} == {"ubuntu", "macos"}
    assert f"scripts/newest_python.sh {declared[-1]} {declared[-2]})" in MAKEFILE
    both = {content for step in STEPS if (content := str(step.get("with", {}).get("python-version"))).count("\n")}
    assert {tuple(sorted(content.split())) for content in both} == {(declared[0], declared[-1])}


def test_actions_have_a_version_and_jobs_have_no_more_permissions_than_they_need():
    actions = [step["uses"] for step in STEPS if "uses" in step]
    assert actions and all(re.search(r"@(v\d+|release/v\d+|[0-9a-f]{40})$", action) for action in actions)
    assert all(workflow["permissions"] == {"contents": "read"} for workflow in WORKFLOWS.values())
    more = {name: job["permissions"] for name, job in JOBS.items() if "permissions" in job}
    assert more == {
        ("docs.yml", "publish"): {"contents": "write"},
        ("release.yml", "publish"): {"id-token": "write"},
        ("release.yml", "github-release"): {"contents": "write"},
        ("release.yml", "docs"): {"contents": "write"},
    }
    assert JOBS["release.yml", "publish"]["environment"] == "pypi"


def test_forms_of_issues_have_what_a_report_needs():
    forms = [yaml.safe_load((FORGE / f"ISSUE_TEMPLATE/{name}.yml").read_text()) for name in ("bug", "feature")]
    assert all(form["name"] and form["description"] and form["body"] for form in forms)
    (info,) = [field for field in forms[0]["body"] if field.get("id") == "info"]
    assert "replicax info" in info["attributes"]["label"] and info["validations"]["required"]
    assert yaml.safe_load((FORGE / "dependabot.yml").read_text())["updates"][0]["package-ecosystem"] == "github-actions"


def test_nothing_says_where_the_project_lives():
    files = [*ROOT.glob("*.md"), *ROOT.glob("*.cff"), *ROOT.glob("*.toml"), *FORGE.rglob("*.y*ml")]
    texts = {path.name: path.read_text(encoding="utf-8") for path in files}
    named = {name for name, text in texts.items() if re.search(r"(github|gitlab)\.(com|io)/[\w-]*/?replicax", text)}
    assert not named and len(texts) > 10


# The documentation site


@pytest.fixture
def place(tmp_path):
    """A function that publishes a site with one page of this text, and the branch."""
    branch = tmp_path / "branch"
    branch.mkdir()

    def publish(version, text):
        site = tmp_path / f"site {text}"
        site.mkdir(exist_ok=True)
        (site / "index.html").write_text(text)
        (site / f"{text}.html").touch()
        publish_docs.publish(site, branch, version)

    return publish, branch


def test_a_folder_that_is_no_site_is_left_as_it_is(place):
    publish, branch = place
    (branch / "dev").mkdir(parents=True)
    (branch / "dev" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="no published site"):
        publish("dev", "first")
    assert (branch / "dev" / "notes.txt").read_text() == "mine"


def test_the_first_documentation_is_that_of_development(place):
    publish, branch = place
    publish("dev", "first")
    assert 'url=dev/"' in (branch / "index.html").read_text()
    assert json.loads((branch / "versions.json").read_text()) == [{"name": "dev", "version": "dev"}]
    assert (branch / ".nojekyll").is_file() and not (branch / "stable").exists()


def test_stable_is_the_newest_release(place):
    publish, branch = place
    for version in ["dev", "0.9.0", "0.10.0", "0.11.0rc1", "0.9.1"]:
        publish(version, version)
    assert (branch / "stable" / "index.html").read_text() == "0.10.0"
    assert 'url=stable/"' in (branch / "index.html").read_text()
    versions = json.loads((branch / "versions.json").read_text())
    assert [entry["version"] for entry in versions] == ["dev", "stable", "0.11.0rc1", "0.10.0", "0.9.1", "0.9.0"]
    assert [entry["name"] for entry in versions][1:4] == ["stable (0.10.0)", "0.11.0rc1", "0.10.0"]
    assert all((branch / entry["version"] / "index.html").is_file() for entry in versions)


def test_documentation_that_is_published_again_replaces_the_old_one(place):
    publish, branch = place
    publish("0.1.0", "old")
    publish("0.1.0", "new")
    for folder in ("0.1.0", "stable"):
        assert sorted(path.name for path in (branch / folder).iterdir()) == ["index.html", "new.html"]


def test_what_is_no_site_or_no_version_is_refused(place, tmp_path, capsys):
    publish, branch = place
    for version in ("main", "../dev", "v0.1.0", "0.1"):
        with pytest.raises(ValueError, match="expected a version such as 0.1.0"):
            publish(version, "x")
    with pytest.raises(SystemExit) as ended:
        publish_docs.main([str(tmp_path / "no"), str(branch), "--version", "dev"])
    assert ended.value.code == 2 and "Build the site first: make docs" in capsys.readouterr().err
    assert list(branch.iterdir()) == []
