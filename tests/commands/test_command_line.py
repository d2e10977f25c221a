"""`replicax` alone: what it can do, suggestions for misspelled commands, and the table of subcommands."""

from __future__ import annotations

import argparse
import importlib.util
import shlex

import pytest

from replicax import __version__
from replicax._commands import main, table
from replicax._commands.command_line import overview
from replicax._report.terminal import Style


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_the_overview_names_every_command_with_an_example(arguments, capsys):
    assert main(arguments) == 0
    shown = capsys.readouterr()
    assert not shown.err
    for command in table.COMMANDS:
        assert f"  {command.name} " in shown.out and command.summary in shown.out and command.example in shown.out
    assert "Documentation: " in shown.out and __version__ in shown.out
    assert max(map(len, shown.out.splitlines())) <= 120


def test_the_overview_has_colours_only_when_asked_for(capsys, monkeypatch):
    assert "\x1b[" in overview(Style(True)) and "\x1b[" not in overview(Style(False))
    main([])
    assert "\x1b[" not in capsys.readouterr().out  # not a terminal
    monkeypatch.setenv("FORCE_COLOR", "1")
    main([])
    assert "\x1b[1m" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    main([])
    assert "\x1b[" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "meant"), [("lanch", "launch"), ("Plan", "plan"), ("check_tf", "check-tf"), ("runtf", "run-tf")]
)
def test_a_misspelled_command_is_suggested(typed, meant, capsys):
    assert main([typed, "train.py"]) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert f"There is no command {typed!r}. Did you mean `replicax {meant}`?" in shown.err


def test_a_word_like_no_command_is_answered_by_the_list(capsys):
    assert main(["help", "xyzzy"]) == 2
    told = capsys.readouterr().err
    assert "There is no command 'xyzzy'.\n" in told and all(command.name in told for command in table.COMMANDS)
    assert main(["--workers", "4"]) == 2
    assert "There is no option '--workers' here. Options of a command stand after it." in capsys.readouterr().err


def test_an_interrupted_command_ends_without_a_traceback(monkeypatch, capsys):
    def interrupt(command, arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(table.Command, "run", interrupt)
    assert main(["export"]) == 130 and not capsys.readouterr().err


def test_the_version_is_shown(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"replicax {__version__}\n"


@pytest.mark.parametrize("command", table.COMMANDS, ids=lambda command: command.name)
def test_every_command_has_a_parser_and_a_help_text(command, capsys):
    parser = command.parser()
    assert isinstance(parser, argparse.ArgumentParser) and parser.prog == f"replicax {command.name}"
    with pytest.raises(SystemExit) as end:
        main([command.name, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: replicax {command.name}")
    with pytest.raises(SystemExit) as end:
        main(["help", command.name])
    assert end.value.code == 0


def test_the_examples_of_the_table_are_command_lines_that_the_commands_take():
    for command in table.COMMANDS:
        program, name, *arguments = shlex.split(command.example)
        assert (program, name) == ("replicax", command.name)
        command.parser().parse_args(arguments)


def test_the_modules_of_the_table_are_there():
    assert all(importlib.util.find_spec(command.module) for command in table.COMMANDS)


def test_the_command_and_all_parsers_do_without_jax(run_python):
    done = run_python(
        """
        import sys
        from replicax._commands import main, table
        main([])
        main(["lanch"])
        table.parsers()
        loaded = {"jax", "numpy", "rich"} & set(sys.modules)
        assert not loaded, loaded
        """,
        env={"REPLICAX_VIRTUAL_DEVICES": None, "REPLICAX_COMPILATION_CACHE": None},
        fresh=True,
    )
    assert done.returncode == 0, done.stderr
