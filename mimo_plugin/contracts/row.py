# SPDX-License-Identifier: Apache-2.0
"""One row of a contract table: an upstream symbol and what must hold for it."""

from __future__ import annotations

from dataclasses import dataclass

from mimo_plugin.contracts.source import SymbolFacts


@dataclass(frozen=True, kw_only=True)
class Contract:
    """One upstream symbol and what must hold for it.

    Attributes:
        module: dotted module below the package.
        package: the engine's package.
        name: qualified name in the module; a bare name may also be an import there, when
            ``importable`` says so (names that the plugin replaces in that module).
        params: parameters that must exist.
        positional: parameters that must come first, in this order.
        closed: parameters without a default may only be those named here (otherwise a call of
            ours would break when upstream adds one).
        accepts: what else an override of ours takes: any other parameter, required or not, would
            reach it and fail.  None: we don't override it, or ours takes whatever comes.
        members: attributes, fields, properties or methods an instance must have.
        exact_methods: the methods the class body defines, no more and no less: the plugin puts a
            class of its own in this one's place.
        bases: classes it must derive from.
        value: the constant's value.
        attribute_use: instead of a symbol: every ``x`` in ``….<attribute_use>.x`` of the module
            must be one of ``members``.
        features: features that need it, or parts of them (``vision-qwen``); empty means the plugin
            itself.  ``why`` says what for.
    """

    module: str
    package: str = "vllm"
    name: str = ""
    params: tuple[str, ...] = ()
    positional: tuple[str, ...] = ()
    closed: bool = False
    accepts: tuple[str, ...] | None = None
    importable: bool = False
    members: tuple[str, ...] = ()
    exact_methods: tuple[str, ...] | None = None
    bases: tuple[str, ...] = ()
    value: str | None = None
    attribute_use: str = ""
    features: tuple[str, ...] = ()
    why: str

    @property
    def key(self) -> str:
        """Unique name of the row."""
        return f"{self.module}:{self.name or '*.' + self.attribute_use}"

    @property
    def symbol(self) -> str:
        """The symbol as a user would import it."""
        return f"{self.package}.{self.module}.{self.name or '*.' + self.attribute_use}"

    def problems(self, facts: SymbolFacts | None) -> list[str]:
        """One line for everything in which ``facts`` differ from the row."""
        if facts is None:
            return [self._line("to exist", "nothing of that name")]
        if self.attribute_use:
            extra = sorted(facts.members - set(self.members))
            return (
                [self._line(f"only {', '.join(self.members)}", ", ".join(extra))] if extra else []
            )
        if facts.kind == "import":
            if self.importable:
                return []
            return [self._line("a definition in that module", "an import")]
        return [*self._signature(facts), *self._class(facts), *self._value(facts)]

    def _signature(self, facts: SymbolFacts) -> list[str]:
        if not (self.params or self.positional or self.closed or self.accepts is not None):
            return []
        if facts.kind != "function":
            return [self._line("a function", f"a {facts.kind}")]
        shown = f"({', '.join(facts.params)})"
        lines = []
        missing = [name for name in self.params if name not in facts.params]
        if missing and not facts.takes_any:
            lines.append(self._line(f"parameter {', '.join(missing)}", shown))
        head = facts.params[: len(self.positional)]
        if head != self.positional:
            lines.append(self._line(f"first parameters ({', '.join(self.positional)})", shown))
        known = {*self.params, *self.positional, *(self.accepts or ())}
        if self.accepts is not None:
            extra = [name for name in facts.params if name not in known]
            if extra:
                lines.append(self._line("no further parameter", f"new {', '.join(extra)}"))
        elif self.closed:
            extra = [name for name in facts.required if name not in known]
            if extra:
                lines.append(
                    self._line("no further required parameter", f"required {', '.join(extra)}")
                )
        return lines

    def _class(self, facts: SymbolFacts) -> list[str]:
        if not (self.members or self.bases or self.exact_methods is not None):
            return []
        if facts.kind != "class":
            return [self._line("a class", f"a {facts.kind}")]
        lines = []
        missing = [name for name in self.members if name not in facts.members]
        if missing:
            lines.append(self._line(f"attribute or method {', '.join(missing)}", "none"))
        wrong = [name for name in self.bases if name not in facts.bases]
        if wrong:
            lines.append(self._line(f"base class {', '.join(wrong)}", ", ".join(facts.bases)))
        if self.exact_methods is not None:
            added = sorted(set(facts.methods) - set(self.exact_methods))
            removed = sorted(set(self.exact_methods) - set(facts.methods))
            if added:
                lines.append(self._line("no further method", f"new {', '.join(added)}"))
            if removed:
                lines.append(self._line(f"method {', '.join(removed)}", "none"))
        return lines

    def _value(self, facts: SymbolFacts) -> list[str]:
        if self.value is None or facts.value == self.value:
            return []
        return [self._line(repr(self.value), repr(facts.value))]

    def _line(self, expected: str, found: str) -> str:
        who = ", ".join(self.features) or "every feature"
        return f"{self.symbol}: expected {expected}, found {found}; affects {who}: {self.why}"


def call(
    module: str,
    name: str,
    why: str,
    *,
    first: str = "",
    named: str = "",
    accepts: str | None = None,
    closed: bool = True,
    features: tuple[str, ...] = (),
) -> Contract:
    """A function: ``first`` parameters in order, ``named`` ones anywhere, no other required.

    ``accepts`` lists what an override of ours takes besides; then nothing else may exist.
    """
    return Contract(
        module=module,
        name=name,
        positional=tuple(first.split()),
        params=tuple(named.split()),
        closed=closed,
        accepts=None if accepts is None else tuple(accepts.split()),
        features=features,
        why=why,
    )


def class_(
    module: str,
    name: str,
    why: str,
    *,
    has: str = "",
    base: str = "",
    features: tuple[str, ...] = (),
) -> Contract:
    """A class with members ``has`` and base ``base``."""
    return Contract(
        module=module,
        name=name,
        members=tuple(has.split()),
        bases=tuple(base.split()),
        features=features,
        why=why,
    )


def replaced(module: str, name: str, why: str, *, features: tuple[str, ...] = ()) -> Contract:
    """A module-level name that the plugin puts its own object into."""
    return Contract(module=module, name=name, importable=True, features=features, why=why)
