"""The command `replicax completion`: scripts that complete command lines in bash, zsh and fish.

The scripts are made from the parsers of the table of subcommands, and have all words in them: completing a word starts
no Python. The library shtab (1.13) does the same, but its script for bash does not complete `--option=value`, offers
options where a value is due, and files where a value may be left out, and completes replicax's options behind the
user's program.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from replicax._commands import table
from replicax._commands.command_line import OPTIONS

_DESCRIPTION = """\
Print a script with which your shell completes the commands of replicax and their options.
"""

_EPILOG = """\
examples:
  eval "$(replicax completion bash)"                                          in ~/.bashrc
  eval "$(replicax completion zsh)"                                           in ~/.zshrc, after compinit
  replicax completion fish > ~/.config/fish/completions/replicax.fish         once, and after an update

exit status:
  0 when the script was printed; 2 when an option is wrong, or there is no such shell.
"""

_FILES = {"FILE", "PATH", "PROGRAM"}  # what options and arguments are called that stand for files
_LONGEST = 70  # characters of a description


@dataclass(frozen=True)
class Argument:
    """An option, or an argument without a name.

    Attributes:
        flags: the names of the option; none for an argument.
        help: what it does.
        takes_value: whether a value follows.
        choices: the words that it may be.
        is_file: whether it is the path of a file.
        value: what the value is called.
        repeats: whether the option may be given several times.
    """

    flags: tuple[str, ...]
    help: str
    takes_value: bool
    choices: tuple[str, ...]
    is_file: bool
    value: str
    repeats: bool


def arguments_of(parser: argparse.ArgumentParser) -> list[Argument]:
    """Returns the options and arguments of a parser.

    >>> [argument.choices for argument in arguments_of(parser("replicax completion"))][1:]
    [('bash', 'zsh', 'fish')]
    """
    found = []
    for action in parser._actions:
        metavar = action.metavar if isinstance(action.metavar, str) else action.dest
        found.append(
            Argument(
                tuple(sorted(action.option_strings, key=len)),
                _short(action.help or ""),
                action.nargs is None or action.nargs in ("+", "*"),
                tuple(map(str, action.choices or ())),
                metavar in _FILES,
                metavar,
                type(action).__name__ == "_AppendAction",
            )
        )
    return found


def _short(text: str) -> str:
    """Returns the beginning of a help text, in one line."""
    line = re.split(r"[;:] | \(", " ".join(text.replace("%%", "%").split()))[0]
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."


def _runs_program(arguments: Sequence[Argument]) -> bool:
    """Returns whether what follows the first argument belongs to a program of the user's."""
    return any(each.value == "PROGRAM" for each in arguments if not each.flags)


def _commands() -> dict[str, list[Argument]]:
    return {name: arguments_of(parser) for name, parser in table.parsers().items()}


def bash() -> str:
    """Returns the script for bash."""
    words = " ".join([*(command.name for command in table.COMMANDS), *OPTIONS])
    cases, values = [], []
    for name, arguments in _commands().items():
        options = [each for each in arguments if each.flags]
        with_values = [flag for each in options if each.takes_value for flag in each.flags]
        offered = " ".join(flag for each in options for flag in each.flags)
        others = " ".join(choice for each in arguments if not each.flags for choice in each.choices)
        program = int(_runs_program(arguments))
        cases.append(
            f'        {name}) options="{offered}"; takes=" {" ".join(with_values)} "; words="{others}"; '
            f"program={program} ;;"
        )
        for each in options:
            if each.choices:
                pattern = "|".join(f"{name}:{flag}" for flag in each.flags)
                values.append(f'        {pattern}) offer="{" ".join(each.choices)}" ;;')
    return _BASH.format(words=words, cases="\n".join(cases), values="\n".join(values))


_BASH = """\
# Completion of replicax for bash, made by `replicax completion bash`.
_replicax() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}}
    local command=${{COMP_WORDS[1]}} options="" takes=" " words="" program=0 offer="" i
    COMPREPLY=()
    if (( COMP_CWORD == 1 )); then
        COMPREPLY=($(compgen -W "{words}" -- "$cur"))
        return
    fi
    # Bash takes the = of --option=value for a word.
    if [[ $cur == "=" ]]; then
        cur=""
    elif [[ $prev == "=" ]]; then
        prev=${{COMP_WORDS[COMP_CWORD-2]}}
    fi
    case $command in
{cases}
        *) return ;;
    esac
    if (( program )); then  # what follows the program belongs to it
        for (( i = 2; i < COMP_CWORD; i++ )); do
            if [[ $takes == *" ${{COMP_WORDS[i]}} "* ]]; then
                i=$((i + 1))
                [[ ${{COMP_WORDS[i]}} == "=" ]] && i=$((i + 1))
            elif [[ ${{COMP_WORDS[i]}} != -* && ${{COMP_WORDS[i]}} != "=" ]]; then
                return
            fi
        done
    fi
    case $command:$prev in
{values}
    esac
    if [[ -n $offer ]]; then
        COMPREPLY=($(compgen -W "$offer" -- "$cur"))
    elif [[ $takes == *" $prev "* ]]; then
        return  # a value: a file, or anything else
    elif [[ $cur == -* ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$cur"))
    elif [[ -n $words ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$cur"))
    fi
}}
complete -o bashdefault -o default -F _replicax replicax
"""


def zsh() -> str:
    """Returns the script for zsh."""
    commands = "\n".join(f"        {_quoted(f'{each.name}:{each.summary}')}" for each in table.COMMANDS)
    cases = []
    for name, arguments in _commands().items():
        alone = "-A '-*' " if _runs_program(arguments) else ""  # no options after the first argument
        specs = [line for number, each in enumerate(arguments) for line in _zsh_specs(each, arguments, number)]
        lines = " \\\n".join(f"                {spec}" for spec in specs)
        cases.append(f"        {name})\n            _arguments -S {alone}\\\n{lines}\n            ;;")
    options = " ".join(OPTIONS)
    return _ZSH.format(commands=commands, options=options, cases="\n".join(cases))


_ZSH = """\
#compdef replicax
# Completion of replicax for zsh, made by `replicax completion zsh`.
_replicax() {{
    local -a commands
    commands=(
{commands}
    )
    if (( CURRENT == 2 )); then
        _describe -t commands command commands
        compadd -- {options}
        return
    fi
    local command=$words[2]
    shift words
    (( CURRENT-- ))
    case $command in
{cases}
    esac
}}
if [[ $funcstack[1] == _replicax ]]; then
    _replicax "$@"
else
    compdef _replicax replicax
fi
"""


def _zsh_specs(each: Argument, arguments: Sequence[Argument], number: int) -> list[str]:
    """Returns an argument as `_arguments` takes it."""
    action = f"({' '.join(each.choices)})" if each.choices else "_files" if each.is_file else " "
    if not each.flags:
        if each.value == "ARGUMENTS":
            return [_quoted("*::argument:_files")]
        several = "*" if not any(not other.flags for other in arguments[number + 1 :]) and each.is_file else ""
        return [_quoted(f"{several or 1}:{each.value}:{action}")]
    help_text = re.sub(r"([\[\]:\\])", r"\\\1", each.help)
    value = f":{each.value.replace(':', chr(92) + ':')}:{action}" if each.takes_value else ""
    specs = []
    for flag in each.flags:
        others = "*" if each.repeats else f"({' '.join(each.flags)})" if len(each.flags) > 1 else ""
        sign = "=" if each.takes_value and flag.startswith("--") else ""
        specs.append(_quoted(f"{others}{flag}{sign}[{help_text}]{value}"))
    return specs


def fish() -> str:
    """Returns the script for fish."""
    lines = [
        "# Completion of replicax for fish, made by `replicax completion fish`.",
        "complete -c replicax -f",
        *(
            f"complete -c replicax -n __fish_use_subcommand -l {name.strip('-')} -d {_quoted(text)}"
            for name, text in OPTIONS.items()
        ),
        *(
            f"complete -c replicax -n __fish_use_subcommand -a {each.name} -d {_quoted(each.summary)}"
            for each in table.COMMANDS
        ),
    ]
    for name, arguments in _commands().items():
        begin = f"complete -c replicax -n '__fish_seen_subcommand_from {name}'"
        for each in arguments:
            choices = f" -a {_quoted(' '.join(each.choices))}" if each.choices else ""
            flags = "".join(f" -l {flag[2:]}" if flag.startswith("--") else f" -s {flag[1:]}" for flag in each.flags)
            value = (" -r -F" if each.is_file else " -x") if each.takes_value and each.flags else ""
            if flags:
                lines.append(f"{begin}{flags}{value}{choices} -d {_quoted(each.help)}")
            elif each.is_file:
                lines.append(f"{begin} -F")
            elif choices:
                lines.append(f"{begin}{choices}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    r"""Returns a text in single quotes, as all three shells read it in which quotes are escaped outside of quotes.

    >>> _quoted("the program's own")
    "'the program'\\''s own'"
    """
    return "'" + text.replace("'", "'\\''") + "'"


SHELLS: dict[str, Callable[[], str]] = {"bash": bash, "zsh": zsh, "fish": fish}


def parser(program: str) -> argparse.ArgumentParser:
    """Returns the parser of the options."""
    result = argparse.ArgumentParser(
        program, description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("shell", metavar="SHELL", choices=list(SHELLS), help="bash, zsh or fish")
    return result


def main(arguments: Sequence[str], program: str) -> int:
    """Runs the command, and returns its exit status."""
    sys.stdout.write(SHELLS[parser(program).parse_args(arguments).shell]())
    return 0
