# SPDX-License-Identifier: Apache-2.0
"""A model's chat template, applied as vLLM 0.32 applies it (``renderers/hf.py``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mimo_plugin.router.prompt_messages import (
    MARK,
    NotLocal,
    conversation_of,
    tools_of,
    without_developer,
)

#: arguments of ``apply_chat_template`` that a request may set by its own fields only
_OWN_ARGUMENTS = frozenset(
    {
        "conversation",
        "tools",
        "chat_template",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)
_EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "max"})


@dataclass(frozen=True)
class Template:
    """One template, with what is read off its text."""

    text: str

    @cached_property
    def _tree(self) -> Any:
        """Its syntax tree, or None if it can't be parsed."""
        import jinja2
        import jinja2.ext
        import jinja2.sandbox

        class Generation(jinja2.ext.Extension):
            """``{% generation %}``: transformers' own tag; its body is what counts."""

            tags = {"generation"}

            def parse(self, parser: Any) -> Any:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
        )
        try:
            return environment.parse(self.text)
        except jinja2.TemplateError:
            return None

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names that it reads and does not set."""
        import jinja2.meta

        tree = self._tree
        return (
            frozenset() if tree is None else frozenset(jinja2.meta.find_undeclared_variables(tree))
        )

    @cached_property
    def content_format(self) -> str:
        """``openai`` if it loops over the parts of a message's content, else ``string``."""
        tree = self._tree
        return "string" if tree is None or not _loops_over_content(tree) else "openai"

    @cached_property
    def knows_developer(self) -> bool:
        """Whether it has the role ``developer``."""
        return '"developer"' in self.text or "'developer'" in self.text


def _loops_over_content(tree: Any) -> bool:
    from jinja2 import nodes

    lists = {"messages"}
    while True:  # names that messages are assigned to
        more = {
            a.target.name
            for a in tree.find_all(nodes.Assign)
            if isinstance(a.target, nodes.Name) and any(_reads(a.node, name) for name in lists)
        }
        if more <= lists:
            break
        lists |= more
    loops = list(tree.find_all(nodes.For))
    items = {
        loop.target.name
        for loop in loops
        if isinstance(loop.target, nodes.Name) and any(_reads(loop.iter, name) for name in lists)
    }

    def is_content(node: Any) -> bool:
        return any(_reads(node, item, "content") for item in items)

    macros = list(tree.find_all(nodes.Macro))
    for macro in macros:  # content handed to a macro, and a loop over that argument
        given = set(_content_arguments(tree, macro, is_content))
        for loop in macro.find_all(nodes.For):
            if isinstance(loop.iter, nodes.Name) and loop.iter.name in given:
                return True
    in_macros = {id(loop) for macro in macros for loop in macro.find_all(nodes.For)}
    return any(
        is_content(loop.iter)
        or (
            id(loop) not in in_macros
            and isinstance(loop.iter, nodes.Name)
            and loop.iter.name == "content"
        )
        for loop in loops
    )


def _content_arguments(tree: Any, macro: Any, is_content: Any) -> Iterator[str]:
    """Arguments of ``macro`` that get a message's content in some call."""
    from jinja2 import nodes

    names = [argument.name for argument in macro.args]
    for call in tree.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        yield from (
            name for name, given in zip(names, call.args, strict=False) if is_content(given)
        )
        yield from (k.key for k in call.kwargs if k.key in names and is_content(k.value))


def _reads(node: Any, name: str, key: str | None = None) -> bool:
    """Whether ``node`` is the variable (or its ``key``), perhaps filtered, tested or sliced."""
    from jinja2 import nodes

    while True:
        if isinstance(node, (nodes.Filter, nodes.Test)) or (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        ):
            node = node.node
            continue
        break
    if key is not None:
        if isinstance(node, nodes.Getitem):
            if not (isinstance(node.arg, nodes.Const) and node.arg.value == key):
                return False
        elif not (isinstance(node, nodes.Getattr) and node.attr == key):
            return False
        node = node.node
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


@dataclass(frozen=True)
class RenderedChat:
    """A chat as text.

    Attributes:
        text: what the tokenizer gets; with a cut, only what lies before the first medium.
        cut: whether it is only a beginning.
        rest_chars: length of what was cut off.
    """

    text: str
    cut: bool = False
    rest_chars: int = 0


class ChatRenderer:
    """Applies a model's template to requests.

    Args:
        tokenizer: transformers' tokenizer.
        chat_template: the server's ``--chat-template``: text, or a name of one of the tokenizer's.
        no_tools_template: template for chats without tools (of a processor), or None.
        content_format: the server's ``--chat-template-content-format``.
        default_kwargs: the server's ``--default-chat-template-kwargs``.
        exclude_tools_when_none: the server's ``--exclude-tools-when-tool-choice-none``.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        no_tools_template: str | None = None,
        content_format: str = "auto",
        default_kwargs: Mapping[str, Any] | None = None,
        exclude_tools_when_none: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._given = chat_template
        self._no_tools = no_tools_template
        self._content_format = content_format
        self._default_kwargs = dict(default_kwargs or {})
        self._exclude_tools = exclude_tools_when_none
        self._templates = {tools: self._template(tools) for tools in (False, True)}

    def _template(self, tools: bool) -> Template | None:
        if self._given is None and not tools and self._no_tools is not None:
            return Template(self._no_tools)
        try:
            return Template(self._tokenizer.get_chat_template(self._given, [] if tools else None))
        except ValueError:
            return None

    @property
    def available(self) -> bool:
        """Whether there is a template."""
        return self._templates[False] is not None

    @cached_property
    def disabled_thinking_effort(self) -> str:
        """The ``reasoning_effort`` that vLLM's Messages API takes for disabled thinking.

        ``none``, unless the template refuses that or treats it as one of the other efforts.
        """
        texts = {effort: self._effort_text(effort) for effort in _EFFORTS - {"minimal"}}
        none = texts.pop("none")
        return "low" if none is None or none in texts.values() else "none"

    def _effort_text(self, effort: str) -> str | None:
        chat = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": effort}
        try:
            return self.render(chat).text
        except NotLocal:
            return None

    def render(self, body: Mapping[str, Any]) -> RenderedChat:
        """The text of a chat request.

        Raises:
            NotLocal: this shape, or this template, is for an engine's own renderer.
        """
        messages = body.get("messages")
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise NotLocal("no messages")
        if body.get("chat_template") is not None or body.get("echo"):
            raise NotLocal("a template of the request, or echo")
        tools = tools_of(body.get("tools"))
        if self._exclude_tools and body.get("tool_choice") == "none":
            tools = None
        template = self._templates[tools is not None]
        if template is None:
            raise NotLocal("the model has no chat template")
        content_format = self._content_format
        if content_format == "auto":
            content_format = template.content_format
        conversation, cut = conversation_of(messages, content_format)
        if not template.knows_developer:
            conversation = without_developer(conversation)
        arguments = self._arguments(body, template)
        if cut:
            arguments["continue_final_message"] = False
        try:
            text = self._tokenizer.apply_chat_template(
                conversation,
                tools=tools,
                chat_template=template.text,
                tokenize=False,
                **arguments,
            )
        except Exception as error:  # whatever a template raises: the worker will refuse it as well
            raise NotLocal(f"the template refuses it: {error}") from error
        if not isinstance(text, str):
            raise NotLocal("the template gave no text")
        if not cut:
            return RenderedChat(text)
        at = max(text.find(MARK), 0)
        return RenderedChat(text[:at], True, len(text) - at)

    def _arguments(self, body: Mapping[str, Any], template: Template) -> dict[str, Any]:
        """What the template may see of the request's settings."""
        own = body.get("chat_template_kwargs")
        if own is None:
            own = {}
        if not isinstance(own, Mapping) or own.keys() & _OWN_ARGUMENTS:
            raise NotLocal("chat_template_kwargs that the engine treats apart")
        effort, documents = body.get("reasoning_effort"), body.get("documents")
        if effort is not None and effort not in _EFFORTS:
            raise NotLocal(f"reasoning_effort {effort!r}")
        if documents is not None and not isinstance(documents, list):
            raise NotLocal("documents is no list")
        settings: dict[str, Any] = {
            "add_generation_prompt": _flag(body, "add_generation_prompt", True),
            "continue_final_message": _flag(body, "continue_final_message", False),
            "documents": documents,
            "reasoning_effort": effort,
        }
        if effort is not None and "enable_thinking" not in own:
            settings["enable_thinking"] = effort != "none"
        # Later ones win, unless they are None or "auto".
        merged = {**own, **{k: v for k, v in settings.items() if v is not None}}
        merged = {k: v for k, v in merged.items() if v is not None and v != "auto"}
        merged = {**self._default_kwargs, **merged}
        known = template.variables | {
            "add_generation_prompt",
            "continue_final_message",
            "documents",
        }
        return {k: v for k, v in merged.items() if k in known}


def _flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise NotLocal(f"{name} is neither true nor false")
    return value
