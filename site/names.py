"""A Sphinx extension: names in text link to the reference, and `replicax docs PAGE` links to the page.

Docstrings and Markdown pages write names as code (`rx.function`). Where the reference has the name, the code is a link.
"""

from __future__ import annotations

import builtins
import inspect
import re
from typing import Any

import markup
import reference
from docutils import nodes
from docutils.parsers.rst import roles
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

COMMAND = re.compile(r"replicax docs ([\w/-]+)(?:#([\w-]+))?$")
NAME = re.compile(r"(?:rx|replicax|tf)\.[\w.]+(?:\(\))?$")


def name_role(
    role: str, rawtext: str, text: str, lineno: int, inliner: Any, options: Any = None, content: Any = ()
) -> Any:
    """Makes code of `text`, which is the role of text in single backticks in docstrings."""
    env = inliner.document.settings.env
    node = nodes.literal(rawtext, text.replace("\x00", "\\"), classes=["name"])
    node["context"] = (env.ref_context.get("py:module"), env.ref_context.get("py:class"))
    return [node], []


class LinkNames(SphinxPostTransform):
    """Makes links of code that is the name of something in the reference, or the command that shows a page."""

    default_priority = 5  # before Sphinx resolves references

    def run(self, **kwargs: Any) -> None:
        objects = self.env.domains.python_domain.objects
        self._make_exact(objects)
        for node in list(self.document.findall(nodes.literal)):
            text = node.astext()
            if _inside_link(node):
                continue
            if command := COMMAND.match(text):
                self._link(node, command[1], command[2])
                continue
            docname_anchor = self._target(text, node, objects)
            if docname_anchor:
                self._link(node, *docname_anchor)

    def _make_exact(self, objects: dict[str, Any]) -> None:
        """Keeps a name such as `bool` or `DataLossError` from being looked for in every namespace."""
        prefixes = ("tf.errors", "tf") if self.env.docname.startswith("reference/tf/") else ("replicax",)
        for node in self.document.findall(addnodes.pending_xref):
            if node.get("refdomain") == "py":
                node.attributes.pop("refspecific", None)
                target = node["reftarget"]
                exact = (f"{prefix}.{target}" for prefix in prefixes if not hasattr(builtins, target))
                node["reftarget"] = next((name for name in exact if name in objects), target)

    def _target(self, text: str, node: nodes.literal, objects: dict[str, Any]) -> tuple[str, str] | None:
        word = text.removesuffix("()").removeprefix("@")
        if NAME.match(word):
            for full in (re.sub(r"^rx\.", "replicax.", word), word):
                if full in objects:
                    return objects[full].docname, objects[full].node_id
                if full in PAGES:  # a second name
                    return objects[PAGES[full]].docname, objects[PAGES[full]].node_id
        if "context" in node and re.fullmatch(r"[\w.]+", word):
            module, owner = node["context"]
            for full in (f"{module}.{owner}.{word}", f"{module}.{word}", f"replicax.{word}"):
                if full in objects and (objects[full].docname, objects[full].node_id) != (self.env.docname, ""):
                    return objects[full].docname, objects[full].node_id
        return None

    def _link(self, node: nodes.literal, docname: str, anchor: str | None) -> None:
        if docname not in self.env.found_docs:
            return
        uri = "" if docname == self.env.docname else self.app.builder.get_relative_uri(self.env.docname, docname)
        link = nodes.reference("", "", internal=True, refuri=uri + (f"#{anchor}" if anchor else ""))
        if not link["refuri"]:
            return
        node.replace_self(link)
        link += node


def _inside_link(node: nodes.Node) -> bool:
    parent = node.parent
    while parent is not None:
        if isinstance(parent, nodes.reference | nodes.title | addnodes.desc_signature | addnodes.pending_xref):
            return True
        parent = parent.parent
    return False


# Second names of things that have a page under another name, and the private places where they are defined.
PAGES: dict[str, str] = {}


def known() -> None:
    """Notes under which public name each class and function is found that annotations name by its module."""
    for name, value in reference.public().items():
        if inspect.isclass(value):  # else one that prints under another name would be documented as an alias alone
            value.__name__ = value.__qualname__ = name.rpartition(".")[2]
        if inspect.isclass(value) or inspect.isroutine(value):
            PAGES[f"{value.__module__}.{value.__qualname__}"] = f"replicax.{name}"


def missing(app: Sphinx, env: Any, node: Any, content: Any) -> Any:
    """Resolves a name in a signature that is written with the private module in which it is defined."""
    target = node.get("reftarget", "")
    public = PAGES.get(target, f"replicax.{target}")
    found = _objects(env).get(public)
    if node.get("refdomain") != "py" or found is None:
        return None
    uri = app.builder.get_relative_uri(node["refdoc"], found.docname)
    content = nodes.Text(public.rpartition(".")[2]) if "." in target else content
    return nodes.reference("", "", content, internal=True, refuri=f"{uri}#{found.node_id}")


def _objects(env: Any) -> dict[str, Any]:
    objects: dict[str, Any] = env.domains.python_domain.objects
    return objects


def bases(app: Sphinx, name: str, value: Any, options: Any, found: list[Any]) -> None:
    """Shows public bases only, in place of the private classes that stand between."""
    public = {thing for thing in reference.public().values() if inspect.isclass(thing)}
    found[:] = [base for base in value.__mro__[1:] if base in public or base.__module__ == "builtins"][:1]


def signature_of(app: Sphinx, what: str, name: str, value: Any, options: Any, shown: Any, returned: Any) -> Any:
    """Shows the arguments of a class's `__init__` where its metaclass takes any."""
    if inspect.isclass(value) and shown and "*args" in shown.replace(" ", ""):
        parameters = [*inspect.signature(value.__init__).parameters.values()][1:]
        return str(inspect.Signature([each.replace(annotation=each.empty) for each in parameters])), None
    return None


def docstring(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Writes a docstring as reStructuredText."""
    lines[:] = markup.as_markup(lines)


def lists_of_parameters(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Makes lists of the parameters of long signatures: Sphinx writes definitions without terms, which are no HTML."""

    def as_list(found: re.Match[str]) -> str:
        return re.sub(r"(</?)(dl|dd)>", lambda tag: f"{tag[1]}{'ul' if tag[2] == 'dl' else 'li'}>", found[0])

    if "body" in context:
        context["body"] = re.sub(r'<dt class="sig .*?</dt>', as_list, context["body"], flags=re.DOTALL)


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the extension."""
    known()
    roles.register_local_role("name", name_role)
    app.add_post_transform(LinkNames)
    app.connect("missing-reference", missing)
    app.connect("html-page-context", lists_of_parameters)
    app.connect("autodoc-process-bases", bases)
    app.connect("autodoc-process-signature", signature_of)
    app.connect("autodoc-process-docstring", docstring, priority=100)  # before napoleon, which writes markup
    return {"parallel_read_safe": True, "parallel_write_safe": True}
