"""`replicax completion`: what the shells offer, asked of the shells themselves."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess

import pytest

from replicax._commands import completion, main, table

NAMES = {command.name for command in table.COMMANDS}


def needs(shell):
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"there is no {shell}")


def bash(folder, *words):
    """Returns what bash offers for the last of these words, as its completion function answers."""
    script = folder / "completion.bash"
    script.write_text(completion.bash(), encoding="utf-8")
    code = (
        'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); _replicax; '
        '(( ${#COMPREPLY[@]} )) && printf "%s\\n" "${COMPREPLY[@]}"; complete -p replicax >&2'
    )
    command = ["bash", "--norc", "-c", code, "bash", str(script), "replicax", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr == "complete -o bashdefault -o default -F _replicax replicax\n"
    return set(done.stdout.split())


@needs("bash")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["la"], "launch"),
        (["launch", "--co"], "--coordinator --color"),
        (["launch", "--color", ""], "auto always never"),
        (["launch", "--color", "=", "al"], "always"),
        (["launch", "--color", "="], "auto always never"),
        (["launch", "--workers", "4", "--ev"], "--evaluator"),
        (["launch", "--workers", "--"], ""),  # a value
        (["launch", "--workers", "4", "train.py", "--e"], ""),  # an option of the program
        (["launch", "--workers", "=", "4", "train.py", "--e"], ""),
        (["run-tf", "--report", "--no"], "--no-tuning"),
        (["completion", ""], "bash zsh fish"),
        (["plan", "--picture", ""], ""),  # files, which bash adds itself
        (["no-such-command", "--"], ""),
    ],
)
def test_bash_offers(tmp_path, words, offered):
    assert bash(tmp_path, *words) == set(offered.split())


@needs("bash")
def test_bash_offers_every_command_and_every_option(tmp_path):
    assert bash(tmp_path, "") == NAMES | {"--help", "--version"}
    for name, parser in table.parsers().items():
        assert bash(tmp_path, name, "-") == {flag for action in parser._actions for flag in action.option_strings}


@needs("fish")
def test_fish_offers(tmp_path):
    script = tmp_path / "completion.fish"
    script.write_text(completion.fish(), encoding="utf-8")

    def offered(line):
        command = ["fish", "--no-config", "-c", f"source {script}; complete -C {line!r}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert not done.stderr
        return {found.partition("\t")[0] for found in done.stdout.splitlines()}

    assert offered("replicax ") == NAMES
    assert offered("replicax launch --co") == {"--color", "--coordinator"}
    assert offered("replicax info --color a") == {"auto", "always"}
    assert offered("replicax completion ") == {"bash", "zsh", "fish"}


@needs("zsh")
def test_zsh_completes(tmp_path):
    script = tmp_path / "completion.zsh"
    script.write_text(completion.zsh(), encoding="utf-8")
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "PS1": "", "ZDOTDIR": str(tmp_path)}
    shell = subprocess.Popen(["zsh", "-f", "-i"], stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    seen = ""

    def wait_for(text):
        nonlocal seen
        while text not in seen:
            assert select.select([ours], [], [], 60)[0], f"{text!r} does not come after {seen!r}"
            seen += os.read(ours, 1 << 16).decode(errors="replace")
        seen = ""

    def type_in(text):
        os.write(ours, text.encode())

    try:
        setup = 'autoload -U compinit; compinit -u -D; replicax() { print -r "<$*>" }'
        type_in(f"{setup}; source {script}; print rea''dy\n")
        wait_for("ready")
        for typed, completed in {
            "replicax lau\t--evalu\t\n": "<launch --evaluator>",
            "replicax info --color alw\t\n": "<info --color always>",
            "replicax launch --color=nev\t\n": "<launch --color=never>",
            "replicax completion fi\t\n": "<completion fish>",
            "replicax plan --topology 8 --topol\t\n": "<plan --topology 8 --topology>",
        }.items():
            type_in(typed)
            wait_for(completed)
    finally:
        shell.kill()
        shell.wait()
        os.close(ours)


def test_the_command_prints_the_script(capsys):
    for shell in completion.SHELLS:
        assert main(["completion", shell]) == 0
        assert capsys.readouterr().out == completion.SHELLS[shell]()
    with pytest.raises(SystemExit) as end:
        main(["completion", "tcsh"])
    assert end.value.code == 2 and "invalid choice: 'tcsh'" in capsys.readouterr().err
