"""Jinja's sandbox with limits of time and size, for templates of unknown models.

The sandbox keeps a template from the rest of the process, but not from its time and memory: it may
loop for ever, or double a text until the memory is full. So loops, calls, filters and operators
are counted here, with the size of what they return.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sized
from types import BuiltinMethodType
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, nodes
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import _PassArg

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jinja2.runtime import Context

__all__ = ["MAX_CPU_S", "LimitedEnvironment", "TemplateLimitError"]

MAX_CPU_S = 2.0
"""CPU time of one rendering."""
_MAX_TOTAL = 2**27
"""Characters of all texts, and elements of all lists, that one rendering makes."""
_MAX_ELEMENTS = 2**18
"""Elements of a list or mapping, those of its elements included."""
_MAX_NUMBER = 10_000
"""Of a number by which a text or list is multiplied, or another number is raised."""
_MAX_WIDTH = 999
"""Of a format."""
_MAX_DIGITS = 16
"""To which a number is rounded, or by which JSON is indented."""
_CHARACTERS_PER_STEP = 4096
_CHECK_INTERVAL = 64
"""Steps between two looks at the clock, which takes as long as a step."""
_WORK_S = 0.001
"""CPU time between two pauses on a thread beside the main one."""
_PAUSE_S = 0.0001
_REMOVED_FILTERS = frozenset(
    (
        *("batch", "center", "filesizeformat", "forceescape", "pprint", "random", "slice"),
        *("striptags", "urlencode", "urlize", "wordwrap", "xmlattr"),
    )
)
"""Filters without use in a prompt that make large texts of small ones, or are slow."""
_REMOVED_METHODS = frozenset(("center", "expandtabs", "ljust", "rjust", "translate", "zfill"))
_LARGE_WIDTH = re.compile(r"[0-9]{4}|\*|\{[^}]*\{")
"""A width in a format that is large, or that an argument decides."""


class TemplateLimitError(TemplateError):
    """A template takes too long, or makes something too large."""


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox that counts what a template does, on each thread for itself."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    # Any: the options of jinja2.Environment.
    def __init__(self, *, cpu_s: float = MAX_CPU_S, **options: Any) -> None:
        super().__init__(finalize=_printable, **options)
        self._cpu_s = cpu_s
        self._use = threading.local()
        self.concat = self._joined  # type: ignore[method-assign]  # of what templates and macros write
        del self.globals["lipsum"]
        filters, self.filters = self.filters, {}
        for name in filters.keys() - _REMOVED_FILTERS:
            self.add_filter(name, filters[name])
        self.start_rendering()

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Add or replace a filter."""
        self.filters[name] = self._limited_filter(name, function)

    def start_rendering(self) -> None:
        """Count from zero on this thread."""
        use, now_s = self._use, time.thread_time()
        use.num_steps = use.total = 0
        use.end_s = now_s + self._cpu_s
        # The event loop of a server would wait five milliseconds for the interpreter's lock.
        use.gives_way = threading.current_thread() is not threading.main_thread()
        use.pause_s = now_s + _WORK_S

    # Any: values of templates, here and below.
    def limited(self, value: Any) -> Any:
        """Return a value that a template has made. Raises TemplateLimitError if it is too large."""
        if isinstance(value, str):
            self._count_step(1 + len(value) // _CHARACTERS_PER_STEP)
            self._count_size(len(value))
        elif isinstance(value, list | tuple | Mapping):
            num_elements = _num_elements(value)
            self._count_step(1 + num_elements)
            self._count_size(num_elements)
        else:
            self._count_step()
        if isinstance(value, Iterator):
            return self._counted(value)
        return value

    def counted(self, values: Iterable[Any]) -> Iterable[Any]:
        """Return what a loop iterates over."""
        if isinstance(values, Sized):
            self._count_step(len(values))
            return values
        return self._counted(iter(values))

    def concatenated(self, *values: Any) -> str:
        """Return the result of the operator `~`."""
        texts = [one if one.__class__ is str else str(_printable(one)) for one in values]
        self._count_size(sum(map(len, texts)))
        return "".join(texts)

    # The names of its parameters must not be those of keyword arguments.
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
            args = _listed(args)
            __self._check_method(__callee, args)
        return __self.limited(super().call(__context, __callee, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            value = left + right
            # The common case, some thousand times for a long conversation.
            if value.__class__ is str:
                self._count_size(len(value))
                return value
            return self.limited(value)
        if operator == "%" and isinstance(left, str):
            _check_format(left, right)
        elif operator == "*":
            _check_product(left, right)
        elif operator == "**" and not (_is_small(left) and _is_small(right)):
            raise TemplateLimitError(f"numbers of an operator ** must not exceed {_MAX_NUMBER}")
        return self.limited(super().call_binop(context, operator, left, right))

    # Any: jinja2's type for strings that may be marked as safe.
    def wrap_str_format(self, value: Any) -> Any:
        found = super().wrap_str_format(value)
        if found is None:
            return None
        form = value.__self__

        @functools.wraps(found)
        def run(*args: Any, **kwargs: Any) -> str:
            _check_format(form, args, **kwargs)
            text: str = self.limited(found(*args, **kwargs))
            return text

        return run

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        for loop in source.find_all(nodes.For):
            loop.iter = _call_of("counted", loop.iter)
        _replace(source, nodes.Concat, lambda node: _call_of("concatenated", *node.nodes))
        for kind in (nodes.List, nodes.Tuple, nodes.Dict):
            _replace(source, kind, lambda node: _call_of("limited", node))
        return super()._generate(source, *args, **kwargs)

    def _joined(self, texts: Iterable[str]) -> str:
        pieces: list[str] = []
        size = 0
        for text in texts:
            size += len(text)
            if size > _MAX_TOTAL:
                break
            pieces.append(text)
        self._count_size(size)
        return "".join(pieces)

    def _counted(self, values: Iterator[Any]) -> Iterator[Any]:
        for value in values:
            self._count_step()
            yield value

    def _limited_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        check = _FILTER_CHECKS.get(name)
        num_passed = 0 if _PassArg.from_obj(function) is None else 1

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if name == "join":
                args = _listed(args)
            if check is not None:
                check(*args[num_passed:], **kwargs)
            return self.limited(function(*args, **kwargs))

        return run

    def _check_method(self, method: BuiltinMethodType, args: tuple[Any, ...]) -> None:
        owner, name = method.__self__, method.__name__
        if isinstance(owner, str):
            if name in _REMOVED_METHODS:
                raise TemplateLimitError(f"the method {name} of texts is not supported")
            if name == "replace":
                _check_replacement(owner, *args)
            elif name == "join":
                _check_join(args[0] if args else (), owner)
        elif isinstance(owner, int | float | bytes | type):
            raise TemplateLimitError(f"the method {name} is not supported")

    def _count_step(self, num_steps: int = 1) -> None:
        use = self._use
        before = use.num_steps
        use.num_steps = after = before + num_steps
        if before // _CHECK_INTERVAL == after // _CHECK_INTERVAL:
            return
        now_s = time.thread_time()
        if now_s > use.end_s:
            raise TemplateLimitError(f"the template takes more than {self._cpu_s:g} s of CPU time")
        if use.gives_way and now_s > use.pause_s:
            use.pause_s = now_s + _WORK_S
            time.sleep(_PAUSE_S)

    def _count_size(self, size: int) -> None:
        self._use.total += size
        if self._use.total > _MAX_TOTAL:
            raise TemplateLimitError("the template makes too much text")


def _printable(value: Any) -> Any:
    """Return a value that a template writes, whose text is counted with all others."""
    if value.__class__ is not str and isinstance(value, list | tuple | Mapping):
        _num_elements(value)
    return value


def _listed(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments whose elements can be counted."""
    return tuple(list(one) if isinstance(one, Iterator) else one for one in values)


def _num_elements(value: Any) -> int:
    """Return the number of elements of a list or mapping, with those of its elements.

    Raises TemplateLimitError if it, or its text, is too large.
    """
    num_elements = num_characters = 0
    open_values = [value]
    while open_values:
        one = open_values.pop()
        if isinstance(one, str):
            num_characters += len(one)
            continue
        if isinstance(one, Mapping):
            one = (*one.keys(), *one.values())
        if isinstance(one, list | tuple):
            num_elements += len(one)
            if num_elements > _MAX_ELEMENTS or num_characters > _MAX_TOTAL:
                raise TemplateLimitError("the template makes a list that is too large")
            open_values += one
    if num_characters > _MAX_TOTAL:
        raise TemplateLimitError("the template makes a list of too much text")
    return num_elements


def _check_product(left: Any, right: Any) -> None:
    for factor, other in ((left, right), (right, left)):
        if isinstance(other, str | list | tuple):
            size = _num_elements(other) if not isinstance(other, str) else len(other)
            if size * max(int(factor), 0) > _MAX_ELEMENTS:
                raise TemplateLimitError("the template multiplies something too often")
        elif isinstance(other, int) and other.bit_length() > _MAX_NUMBER:
            raise TemplateLimitError("the template computes too large a number")


def _check_replacement(text: Any, old: Any, new: Any, *_: Any) -> None:
    text, old, new = str(text), str(old), str(new)
    num_found = text.count(old)
    if num_found * len(new) > _MAX_TOTAL:
        raise TemplateLimitError("the template replaces something by too long a text")


def _check_join(values: Any, d: Any = "", attribute: Any = None) -> None:
    if attribute is not None:
        raise TemplateLimitError("the attribute of the filter join is not supported; use map")
    size = sum(len(one) if isinstance(one, str) else 0 for one in values)
    if size + len(values) * len(str(d)) > _MAX_TOTAL:
        raise TemplateLimitError("the template joins too many texts")


def _check_format(form: Any, values: Any = (), *more: Any, **named: Any) -> None:
    form = str(form)
    if _LARGE_WIDTH.search(form):
        raise TemplateLimitError(f"a width of a format must not exceed {_MAX_WIDTH}")
    given = (*(values if isinstance(values, list | tuple) else (values,)), *more, *named.values())
    longest = max((len(one) if isinstance(one, str) else 0 for one in given), default=0)
    if longest * (form.count("%") + form.count("{")) > _MAX_TOTAL:
        raise TemplateLimitError("the template formats too many texts")


def _check_number(_: Any, number: Any = 0, *more: Any, indent: Any = None, **named: Any) -> None:
    for value in (number, indent, named.get("precision")):
        if isinstance(value, int | float) and abs(value) > _MAX_DIGITS:
            raise TemplateLimitError(f"a number of a filter must not exceed {_MAX_DIGITS}")
        if isinstance(value, str) and len(value) > _MAX_DIGITS:
            raise TemplateLimitError(f"an indent must not have more than {_MAX_DIGITS} characters")


def _check_indent(text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    size = len(width) if isinstance(width, str) else int(width)
    if (str(text).count("\n") + 1) * size > _MAX_TOTAL:
        raise TemplateLimitError("the template indents too much")


def _check_sum(*values: Any, start: Any = 0, **_: Any) -> None:
    if not isinstance((*values, None, None)[2] or start, int | float):
        raise TemplateLimitError("the filter sum must start from a number")


_FILTER_CHECKS: dict[str, Callable[..., None]] = {
    "format": _check_format,
    "indent": _check_indent,
    "join": _check_join,
    "replace": _check_replacement,
    "round": _check_number,
    "sum": _check_sum,
    "tojson": _check_number,
}


def _is_small(number: Any) -> bool:
    return isinstance(number, int | float) and abs(number) <= _MAX_NUMBER


# Any: an expression.
def _call_of(method: str, *arguments: Any) -> nodes.Call:
    """Return a call of a method of the environment."""
    return nodes.Call(nodes.EnvironmentAttribute(method), list(arguments), [], None, None)


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
