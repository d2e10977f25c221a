"""Functions rewritten by diastatic-malt, loaded in memory, with the lines and the names of the user's source.

malt itself writes the new source to a temporary file and imports it from there. Here the new syntax tree gets the
places of what its parts were made of, so that tracebacks, debuggers, profilers and JAX's messages show the user's file.
"""

from __future__ import annotations
import __future__

import ast
import types
from collections.abc import Iterator
from typing import Any

from malt.core import converter
from malt.impl import api
from malt.pyct import origin_info, parser, transpiler

_FUTURE = 0  # the flags of code under `from __future__ import ...`
for _name in __future__.all_feature_names:
    _FUTURE |= getattr(__future__, _name).compiler_flag

_codes: dict[int, types.CodeType] = {}  # rewritten code, by its id


def is_rewritten(code: types.CodeType) -> bool:
    """Whether this code was made by rewriting a user's function."""
    return id(code) in _codes


class Transpiler(api.PyToPy):
    """Rewrites functions, for which `operators` is the module `ag__`."""

    def __init__(self, operators: Any, options: converter.ConversionOptions):
        super().__init__()
        self._operators, self._options = operators, options

    def rewritten(self, function: types.FunctionType) -> types.FunctionType:
        """The function rewritten, with the same globals, closure and defaults."""
        with self._cache_lock:
            if not self._cache.has(function, self._options):
                self._cache[function][self._options] = self._factory(function)
            factory, names = self._cache[function][self._options]
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
        bound = types.FunctionType(factory, function.__globals__, closure=tuple(cells[name] for name in names))
        new = bound(self._operators)
        new.__defaults__, new.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
        return new

    def _factory(self, function: types.FunctionType) -> tuple[types.CodeType, tuple[str, ...]]:
        """Code that makes the rewritten function of the operators, and the names of the cells that it closes over."""
        context = converter.ProgramContext(self._options)
        node, details = transpiler.GenericTranspiler.transform_function(self, function, context)
        name = details.info.name
        if isinstance(node, ast.Lambda):
            node = ast.Assign(targets=[ast.Name(name, ctx=ast.Store())], value=node)
        else:
            node.name = name
        source = parser.unparse(node)
        origins = origin_info.create_source_map((node,), source, "")
        body = ast.parse(source).body
        _put_in_place(body, {place.lineno: origin for place, origin in origins.items()}, function.__code__)
        free = function.__code__.co_freevars
        module = ast.parse(
            "def outer():\n"
            + "".join(f"    {each} = None\n" for each in free)  # so that it is a cell of the function
            + f"    def make(ag__):\n        return {name}\n    return make"
        )
        make: Any = module.body[0].body[-2]  # type: ignore[attr-defined]
        make.body[:0] = body
        filename = function.__code__.co_filename
        code = compile(module, filename, "exec", flags=function.__code__.co_flags & _FUTURE, dont_inherit=True)
        code = _renamed(code, set(_names(function.__code__)), function.__code__.co_name)
        (outer,) = (each for each in code.co_consts if isinstance(each, types.CodeType))
        (factory,) = (each for each in outer.co_consts if isinstance(each, types.CodeType))
        return factory, factory.co_freevars


def _put_in_place(body: list[ast.stmt], origins: dict[int, Any], code: types.CodeType) -> None:
    """Gives syntax the lines that it was made of; what was made of nothing has the line of what stands before it."""
    places: dict[int, tuple[int, int, int]] = {}
    last = code.co_firstlineno, 0, 0
    for number in range(1, max(statement.end_lineno or 0 for statement in body) + 1):
        if number in origins:
            text = origins[number].source_code_line.rstrip()
            last = origins[number].loc.lineno, len(text) - len(text.lstrip()), len(text.encode())
        places[number] = last
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, (ast.stmt, ast.expr, ast.excepthandler, ast.arg, ast.keyword, ast.alias, ast.pattern)):
                node.lineno, node.col_offset, node.end_col_offset = places[node.lineno]
                node.end_lineno = node.lineno


def _names(code: types.CodeType) -> Iterator[str]:
    yield code.co_name
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _renamed(code: types.CodeType, known: set[str], name: str) -> types.CodeType:
    """Code with the user's names: functions that rewriting brought in are called as the one that they stand in."""
    inside = [
        _renamed(inner, known, inner.co_name if inner.co_name in known else name)
        if isinstance(inner, types.CodeType)
        else inner
        for inner in code.co_consts
    ]
    new = code.replace(co_consts=tuple(inside), co_name=name, co_qualname=name)
    _codes[id(new)] = new
    return new
