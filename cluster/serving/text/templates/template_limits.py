"""Jinja's sandbox with limits on time and size, for templates of unknown models.

The sandbox isolates a template from the rest of the process, but does not limit its time and
memory: it may loop forever, or double a text until the memory is full. Therefore loops, calls,
filters and operators are counted here, with the size of their results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sized
from types import BuiltinMethodType
from typing import TYPE_CHECKING, Any

from jinja2 import nodes
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import _PassArg

from cluster.serving.text.templates.format_limits import check_brace_format, check_percent_format
from cluster.serving.text.templates.operation_limits import (
    FILTER_CHECKS,
    check_method,
    check_power,
    check_product,
    listed,
)
from cluster.serving.text.templates.rendering_budget import MAX_CPU_S, MAX_TOTAL, RenderingBudget
from cluster.serving.text.templates.value_sizes import check_text, num_elements

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jinja2.runtime import Context


__all__ = ["LimitedEnvironment"]

_CHARACTERS_PER_STEP = 4096
_REMOVED_FILTERS = frozenset(
    (
        *("batch", "center", "filesizeformat", "forceescape", "pprint", "random", "slice"),
        *("striptags", "urlencode", "urlize", "wordwrap", "xmlattr"),
    )
)
"""Filters that no prompt needs, and that are slow or turn small texts into large texts."""


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox that counts the operations of a template, separately on each thread."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    # Any: the options of jinja2.Environment.
    def __init__(self, *, cpu_s: float = MAX_CPU_S, **options: Any) -> None:
        super().__init__(finalize=_printable, **options)
        self._budget = RenderingBudget(cpu_s)
        self.concat = self._joined  # type: ignore[method-assign]  # of what templates and macros write
        del self.globals["lipsum"]
        filters, self.filters = self.filters, {}
        for name in filters.keys() - _REMOVED_FILTERS:
            self.add_filter(name, filters[name])

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Add or replace a filter."""
        self.filters[name] = self._limited_filter(name, function)

    def start_rendering(self) -> None:
        """Count from zero on this thread."""
        self._budget.start_rendering()

    def start_compiling(self) -> None:
        """Count from zero the values computed on this thread while a template is compiled."""
        self._budget.start_compiling()

    # Any: values of templates, here and below.
    def limited(self, value: Any) -> Any:
        """Return a value of a template. Raises TemplateLimitError if it is too large."""
        if isinstance(value, str):
            self._budget.count_steps(1 + len(value) // _CHARACTERS_PER_STEP)
            self._budget.count_size(len(value))
        elif isinstance(value, list | tuple | Mapping):
            number = num_elements(value)
            self._budget.count_steps(1 + number)
            self._budget.count_size(number)
        else:
            self._budget.count_steps()
        if isinstance(value, Iterator):
            return self._counted(value)
        return value

    def counted(self, values: Iterable[Any]) -> Iterable[Any]:
        """Return the values of a loop, counted."""
        if isinstance(values, Sized):
            self._budget.count_steps(len(values))
            return values
        return self._counted(iter(values))

    def sliced(self, part: Any) -> Any:
        """Return a part of a text or list, which takes memory of its own."""
        if isinstance(part, Sized):
            self._budget.count_size(len(part))
        return part

    def concatenated(self, *values: Any) -> str:
        """Return the result of the operator `~`."""
        texts = [one if one.__class__ is str else str(_printable(one)) for one in values]
        self._budget.count_size(sum(map(len, texts)))
        return "".join(texts)

    # Parameter names must differ from the names of keyword arguments.
    def call(
        __self,  # noqa: N805
        __context: Context,
        __callee: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if getattr(__callee, "__self__", None) is __self:
            # Written into the template below.
            return __callee(*args)
        if isinstance(__callee, LoopContext):
            args = (__self.counted(args[0]), *args[1:]) if args else args
        elif isinstance(__callee, BuiltinMethodType):
            args = listed(args)
            check_method(__callee, args)
        return __self.limited(super().call(__context, __callee, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            value = left + right
            # The common case, thousands of times for a long conversation.
            if value.__class__ is str:
                self._budget.count_steps()
                self._budget.count_size(len(value))
                return value
            return self.limited(value)
        if operator == "%" and isinstance(left, str):
            check_percent_format(str(left), right)
        elif operator == "*":
            check_product(left, right)
        elif operator == "**":
            check_power(left, right)
        return self.limited(super().call_binop(context, operator, left, right))

    # Any: jinja2's type for strings that may be marked as safe.
    def wrap_str_format(self, value: Any) -> Any:
        found = super().wrap_str_format(value)
        if found is None:
            return None
        form = value.__self__

        @functools.wraps(found)
        def run(*args: Any, **kwargs: Any) -> str:
            check_brace_format(str(form), (*args, *kwargs.values()))
            text: str = self.limited(found(*args, **kwargs))
            return text

        return run

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        for loop in source.find_all(nodes.For):
            loop.iter = _call_of("counted", loop.iter)
        _replace(source, nodes.Concat, lambda node: _call_of("concatenated", *node.nodes))
        for kind in (nodes.List, nodes.Tuple, nodes.Dict):
            _replace(source, kind, lambda node: _call_of("limited", node))
        _replace(source, nodes.Getitem, _counted_slice)
        return super()._generate(source, *args, **kwargs)

    def _joined(self, texts: Iterable[str]) -> str:
        pieces: list[str] = []
        size = 0
        for text in texts:
            size += len(text)
            if size > MAX_TOTAL:
                break
            pieces.append(text)
        self._budget.count_size(size)
        return "".join(pieces)

    def _counted(self, values: Iterator[Any]) -> Iterator[Any]:
        for value in values:
            self._budget.count_steps()
            yield value

    def _limited_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        check = FILTER_CHECKS.get(name)
        num_passed = 0 if _PassArg.from_obj(function) is None else 1

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if name == "join":
                args = listed(args)
            if check is not None:
                check(*args[num_passed:], **kwargs)
            return self.limited(function(*args, **kwargs))

        return run


def _printable(value: Any) -> Any:
    """Return a value that a template writes; its text is counted with all others."""
    check_text(value)
    return value


# Any: an expression.
def _call_of(method: str, *arguments: Any) -> nodes.Call:
    """Return a call of a method of the environment."""
    return nodes.Call(nodes.EnvironmentAttribute(method), list(arguments), [], None, None)


def _counted_slice(node: nodes.Getitem) -> nodes.Node:
    return _call_of("sliced", node) if isinstance(node.arg, nodes.Slice) else node


def _replace(node: nodes.Node, kind: type[nodes.Node], make: Callable[[Any], nodes.Node]) -> None:
    """Replace the nodes of a kind below a node that are loaded, not assigned to."""
    for name in node.fields:
        value = getattr(node, name)
        if isinstance(value, list):
            setattr(node, name, [_replaced(one, kind, make) for one in value])
        elif isinstance(value, nodes.Node):
            setattr(node, name, _replaced(value, kind, make))


# Any: fields of nodes also hold texts and numbers.
def _replaced(value: Any, kind: type[nodes.Node], make: Callable[[Any], nodes.Node]) -> Any:
    if not isinstance(value, nodes.Node):
        return value
    _replace(value, kind, make)
    is_target = getattr(value, "ctx", "load") != "load"
    return make(value) if isinstance(value, kind) and not is_target else value
