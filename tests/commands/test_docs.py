"""`replicax docs`: pages, sections and the words of messages, from the pages that are installed."""

from __future__ import annotations

import pytest

from replicax._base import doc_pages
from replicax._commands import main


def test_without_a_page_all_pages_are_listed_with_their_titles(capsys):
    assert main(["docs"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    listed = dict(lines)
    pages = {
        path.relative_to(doc_pages.folder()).with_suffix("").as_posix() for path in doc_pages.folder().rglob("*.md")
    }
    assert set(listed) == pages
    assert listed["how-to/launch"] == "Launch multi-worker jobs"


@pytest.mark.parametrize("name", ["how-to/launch", "launch", "how-to/launch.md", "how-to/launch.html"])
def test_a_page_is_shown_as_it_is_written(name, capsys):
    assert main(["docs", name]) == 0
    assert capsys.readouterr().out == (doc_pages.folder() / "how-to" / "launch.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [*doc_pages.MOVED, "find-errors", "which-tool.html"])
def test_old_name_shows_the_page_under_its_new_name(name, capsys):
    assert main(["docs", name]) == 0
    moved = {**doc_pages.MOVED, "find-errors": "how-to/debugging", "which-tool.html": "choosing-a-tool"}
    assert capsys.readouterr().out == (doc_pages.folder() / f"{moved[name]}.md").read_text(encoding="utf-8")


def test_a_section_ends_where_the_next_one_begins(capsys):
    assert main(["docs", "how-to/launch#slurm"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "## Slurm"
    assert not any(line.startswith("## ") for line in lines[1:])


def test_a_comment_in_code_is_no_section(tmp_path, monkeypatch, capsys):
    (tmp_path / "page.md").write_text("# A page\n\n```python\n# a comment\n```\n\n## Last\n\nwords\n")
    monkeypatch.setattr(doc_pages, "folder", lambda: tmp_path)
    assert main(["docs", "page#a-comment"]) == 1
    assert "page has no section #a-comment. It has #a-page, #last." in capsys.readouterr().err
    assert main(["docs", "page#last"]) == 0
    assert capsys.readouterr().out == "## Last\n\nwords\n"


def test_a_section_that_is_not_there_is_answered_with_the_nearest(tmp_path, monkeypatch, capsys):
    titles = ["There is no file ...", "There is no folder ...", "Other", "Words", "There is no device ..."]
    (tmp_path / "page.md").write_text("".join(f"## {title}\n\n" for title in titles))
    monkeypatch.setattr(doc_pages, "folder", lambda: tmp_path)
    assert main(["docs", "page#there-is-no-divice"]) == 1
    assert "It has #there-is-no-device-, " in (said := capsys.readouterr().err) and "#words" not in said
    assert main(["docs", "page#there-is-no-device"]) == 0  # as the site finds it, too
    assert capsys.readouterr().out == "## There is no device ...\n"


def test_the_head_of_a_tutorial_is_not_shown_and_its_cells_are_code(tmp_path, monkeypatch, capsys):
    (tmp_path / "page.md").write_text(
        "---\nkernelspec:\n  name: python3\n---\n\n# A page\n\n```{code-cell}\n1 + 1\n```\n"
    )
    monkeypatch.setattr(doc_pages, "folder", lambda: tmp_path)
    assert main(["docs", "page"]) == 0
    assert capsys.readouterr().out == "# A page\n\n```python\n1 + 1\n```\n"


def test_a_misspelled_page_is_an_error_with_the_one_that_is_meant(capsys):
    assert main(["docs", "lanch"]) == 1
    assert "there is no page lanch. Did you mean how-to/launch?" in capsys.readouterr().err


def test_a_whole_message_is_found_by_the_heading_that_it_begins_with(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.md").write_text("# A\n\n## `There is no device ...`\n\nNone.\n\n## `... is not there`\n\nNone.\n")
    monkeypatch.setattr(doc_pages, "folder", lambda: tmp_path)
    assert main(["docs", "--search", "DeviceError: There is no device GPU:9. There are CPU:0."]) == 0
    assert capsys.readouterr().out.split("\n")[0].strip() == "a#there-is-no-device-"
    assert main(["docs", "--search", "The file is not there"]) == 0
    assert "is not there" in capsys.readouterr().out


def test_page_is_found_by_its_words(capsys):
    assert main(["docs", "early", "stopping"]) == 0
    assert capsys.readouterr().out == (doc_pages.folder() / "how-to/early-stopping.md").read_text(encoding="utf-8")


def test_words_that_are_no_page_are_searched_for(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.md").write_text("# A\n\n## `The replicas differ in ...`\n\nStop early.\n")
    monkeypatch.setattr(doc_pages, "folder", lambda: tmp_path)
    for arguments in (["The replicas differ in x"], ["the", "replicas", "differ"], ["early", "stop"]):
        assert main(["docs", *arguments]) == 0
        assert capsys.readouterr().out.split()[0] == "a#the-replicas-differ-in-"
    assert main(["docs", "other", "words"]) == 1
    assert "there is no page other words, and none has these words." in capsys.readouterr().err


def test_whole_words_are_found_before_parts_of_words_and_titles_before_text(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.md").write_text("# Schemas\n\n## Text\n\nAn EMA.\n\n## The EMA\n\nWords.\n")
    monkeypatch.setattr(doc_pages, "folder", lambda: tmp_path)
    assert main(["docs", "--search", "EMA"]) == 0
    assert capsys.readouterr().out.split("\n")[::2] == ["  a#the-ema", "  a#text", "  a", ""]


def test_words_are_found_as_they_stand_before_pages_that_have_them_all(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.md").write_text("# A\n\nThere is no\n`device` here.\n\n## Apart\n\nNo device, there.\n")
    (tmp_path / "b.md").write_text("# B\n\nNo device is there.\n")
    monkeypatch.setattr(doc_pages, "folder", lambda: tmp_path)
    assert main(["docs", "--search", "There is no device"]) == 0
    assert capsys.readouterr().out.split() == ["a", "A", "b", "B"]
    (tmp_path / "b.md").rename(tmp_path / "troubleshooting.md")  # where most words of messages are
    assert main(["docs", "--search", "device there"]) == 0
    assert capsys.readouterr().out.split() == ["troubleshooting", "B", "a", "A", "a#apart", "Apart"]
    (tmp_path / "troubleshooting.md").rename(tmp_path / "b.md")
    assert main(["docs", "--search", "device there"]) == 0
    assert capsys.readouterr().out.split() == ["a", "A", "a#apart", "Apart", "b", "B"]
    assert main(["docs", "--search", "cluster"]) == 1
    assert "no page has 'cluster'" in capsys.readouterr().err
