# SPDX-License-Identifier: Apache-2.0
"""Facts about Python source, read with ``ast``: nothing of what is read is imported.

``SourceTree(root)`` answers, for a package directory, which classes, functions, methods, fields
and constants a module holds.  Members of base classes are included as long as the base lives in
the same package.  Each file is parsed once.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, kw_only=True)
class SymbolFacts:
    """What the source says about one symbol.

    ``kind`` is ``class``, ``function``, ``constant`` or ``import``.  ``params`` are the named
    parameters without ``self``/``cls``; ``required`` those of them that have no default.
    ``methods`` are the functions defined in the class body itself, ``members`` everything an
    instance has (methods, fields, attributes assigned through ``self``), bases included.
    """

    kind: str
    params: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    takes_any: bool = False
    methods: tuple[str, ...] = ()
    members: frozenset[str] = frozenset()
    bases: tuple[str, ...] = ()
    value: Any = None


class SourceTree:
    """The Python files below ``root``, the directory of package ``package``."""

    def __init__(self, root: Path, package: str) -> None:
        self.root = root
        self.package = package
        self._modules: dict[str, ast.Module | None] = {}
        self._names: dict[str, dict[str, ast.stmt]] = {}
        self._members: dict[ast.ClassDef, frozenset[str]] = {}

    def module(self, dotted: str) -> ast.Module | None:
        """The parsed module ``dotted`` (without the package's own name), or None."""
        if dotted not in self._modules:
            self._modules[dotted] = self._parse(dotted)
        return self._modules[dotted]

    def _parse(self, dotted: str) -> ast.Module | None:
        base = self.root.joinpath(*dotted.split(".")) if dotted else self.root
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                try:
                    return ast.parse(path.read_text(encoding="utf-8"))
                except (SyntaxError, UnicodeDecodeError):
                    return None
        return None

    def lookup(self, module: str, qualname: str) -> SymbolFacts | None:
        """Facts about ``qualname`` (``Class``, ``Class.method``, ``function``, ``CONSTANT``)."""
        owner, _, member = qualname.partition(".")
        node = self._top_level(module).get(owner)
        if node is None:
            return None
        if not member:
            return self._facts(module, node, owner)
        if not isinstance(node, ast.ClassDef):
            return None
        for _, cls in self._mro(module, node):
            found = _last_definition(cls, member)
            if found is not None:
                return _function_facts(found, method=True)
        return None

    def attribute_uses(self, module: str, attribute: str) -> set[str]:
        """Names ``x`` for which ``module`` holds an expression ``<anything>.attribute.x``."""
        tree = self.module(module)
        if tree is None:
            return set()
        return {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Attribute)
            and node.value.attr == attribute
        }

    def _top_level(self, module: str) -> dict[str, ast.stmt]:
        names = self._names.get(module)
        if names is None:
            tree = self.module(module)
            names = {}
            for node in _statements(tree.body if tree else []):
                for name in _bound_names(node):
                    # A class that is wrapped afterwards (`C = decorate(C)`) keeps its methods.
                    if not (isinstance(node, ast.Assign) and _is_class(names.get(name))):
                        names[name] = node
            self._names[module] = names
        return names

    def _facts(self, module: str, node: ast.stmt, name: str) -> SymbolFacts:
        if isinstance(node, _FUNCTION):
            return _function_facts(node, method=False)
        if isinstance(node, ast.ClassDef):
            mro = self._mro(module, node)
            return SymbolFacts(
                kind="class",
                methods=tuple(dict.fromkeys(f.name for f in node.body if isinstance(f, _FUNCTION))),
                members=frozenset().union(*(self._own_members(cls) for _, cls in mro)),
                bases=tuple(cls.name for _, cls in mro[1:])
                + tuple(ast.unparse(base) for base in node.bases),
            )
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            return SymbolFacts(kind="import")
        value = getattr(node, "value", None)
        try:
            literal = ast.literal_eval(value) if value is not None else None
        except ValueError:
            literal = None
        return SymbolFacts(kind="constant", value=literal)

    def _own_members(self, cls: ast.ClassDef) -> frozenset[str]:
        if cls not in self._members:
            self._members[cls] = frozenset(_class_members(cls))
        return self._members[cls]

    def _mro(self, module: str, cls: ast.ClassDef) -> list[tuple[str, ast.ClassDef]]:
        """``cls`` and those of its bases that live in this package, nearest first."""
        found: list[tuple[str, ast.ClassDef]] = []
        todo = [(module, cls)]
        while todo:
            where, node = todo.pop(0)
            if any(seen is node for _, seen in found):
                continue
            found.append((where, node))
            for base in node.bases:
                resolved = self._resolve_class(where, base)
                if resolved is not None:
                    todo.append(resolved)
        return found

    def _resolve_class(self, module: str, base: ast.expr) -> tuple[str, ast.ClassDef] | None:
        if isinstance(base, ast.Subscript):
            base = base.value
        if not isinstance(base, ast.Name):
            return None
        name, where = base.id, module
        for _ in range(8):  # a chain of re-exports; longer ones do not occur
            node = self._top_level(where).get(name)
            if isinstance(node, ast.ClassDef):
                return where, node
            if not isinstance(node, ast.ImportFrom):
                return None
            target = self._import_target(where, node)
            if target is None:
                return None
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    name = alias.name
            where = target
        return None

    def _import_target(self, module: str, node: ast.ImportFrom) -> str | None:
        source = node.module or ""
        if node.level:
            parents = module.split(".")
            kept = parents[: len(parents) - node.level]
            return ".".join([*kept, source] if source else kept)
        if source == self.package:
            return ""
        prefix = self.package + "."
        return source[len(prefix) :] if source.startswith(prefix) else None


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Top-level statements, those inside ``if`` and ``try`` included."""
    flat: list[ast.stmt] = []
    for node in body:
        if isinstance(node, ast.If):
            flat += _statements(node.body) + _statements(node.orelse)
        elif isinstance(node, ast.Try):
            flat += _statements(node.body)
            for handler in node.handlers:
                flat += _statements(handler.body)
            flat += _statements(node.orelse) + _statements(node.finalbody)
        else:
            flat.append(node)
    return flat


def _bound_names(node: ast.stmt) -> list[str]:
    if isinstance(node, (*_FUNCTION, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [
        name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)
    ]


def _class_members(cls: ast.ClassDef) -> set[str]:
    members: set[str] = set()
    for node in cls.body:
        members.update(_bound_names(node))
        if isinstance(node, _FUNCTION):
            for inner in ast.walk(node):
                if (
                    isinstance(inner, ast.Attribute)
                    and isinstance(inner.ctx, ast.Store)
                    and isinstance(inner.value, ast.Name)
                    and inner.value.id == "self"
                ):
                    members.add(inner.attr)
    return members


def _decorators(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}


def _is_class(node: ast.stmt | None) -> bool:
    return isinstance(node, ast.ClassDef)


def _last_definition(cls: ast.ClassDef, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    found = None
    for node in cls.body:
        if (
            isinstance(node, _FUNCTION)
            and node.name == name
            and "overload" not in _decorators(node)
        ):
            found = node
    return found


def _function_facts(node: ast.FunctionDef | ast.AsyncFunctionDef, *, method: bool) -> SymbolFacts:
    args = node.args
    positional = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    required = positional[: len(positional) - len(args.defaults)]
    if method and "staticmethod" not in _decorators(node):
        positional, required = positional[1:], required[1:]
    keyword = [arg.arg for arg in args.kwonlyargs]
    required += [
        name for name, default in zip(keyword, args.kw_defaults, strict=True) if default is None
    ]
    return SymbolFacts(
        kind="function",
        params=(*positional, *keyword),
        required=tuple(required),
        takes_any=args.kwarg is not None,
    )
