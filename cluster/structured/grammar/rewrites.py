"""Rewrites loops into right-recursive rules, for which xgrammar makes masks fastest.

xgrammar turns a loop into a rule, and checks tokens that cross the end of a rule when it makes a
mask: in a loop over words that takes milliseconds. Here a loop becomes a right-recursive rule that
includes everything after the loop. Such rules are one automaton, for which xgrammar precomputes the
tokens when it compiles; a mask takes microseconds.

Of long repetitions of characters, xgrammar counts a part in its parser, for which its masks allow
tokens that its parser then rejects. Here blocks of characters are counted, and the characters that
follow them are a chain of rules longer than a block and a token: at the end of a block, the chain
allows the tokens that span it.

The equal parts of a grammar are shared as rules, and rules with a single use are inlined: xgrammar
compares the states of each rule with all other rules, and writes the states of the whole grammar
once for each rule of a compiled grammar, so fewer rules take less time and memory.
"""

from __future__ import annotations

from collections import Counter

from cluster.structured.grammar.expressions import (
    MAX_SIZE,
    Alternation,
    Characters,
    Concat,
    Expression,
    Lookahead,
    Repeat,
    Rule,
    Text,
    replaced,
    size_of,
)

__all__ = [
    "MAX_CHAIN",
    "counted_letters",
    "inline_rules",
    "with_loops_as_rules",
    "with_shared_parts",
]

_MAX_UNROLLED = 256
"""A repetition that expands to more characters is not unrolled."""
MAX_CHAIN = 64
"""A repetition of more characters has blocks."""
_MAX_LETTERS = 16
"""Characters in all alternatives of a part that is counted in blocks."""
_BLOCK = 16
_LARGE_BLOCK = 32
_MOST_PER_TOKEN = 32
"""Characters of almost all tokens."""


def with_loops_as_rules(
    expression: Expression, *, prefix: str = "loop"
) -> tuple[dict[str, Expression], Expression]:
    """Return rules, named with a prefix, and an equivalent expression that refers to them."""
    writer = _LoopRewriter(prefix)
    start = writer.followed(expression, Concat(()))
    return writer.rules, start


class _LoopRewriter:
    """Works from the end backward, since the rule of a loop includes everything behind it."""

    def __init__(self, prefix: str) -> None:
        self.rules: dict[str, Expression] = {}
        self._prefix = prefix

    def followed(self, expression: Expression, rest: Expression) -> Expression:
        """Return an expression followed by `rest`."""
        if not _has_loop(expression):
            return _joined(expression, rest)
        match expression:
            case Concat(parts):
                for part in reversed(parts):
                    rest = self.followed(part, rest)
                return rest
            case Alternation(parts):
                rest = self._named(rest)
                return Alternation(tuple(self.followed(part, rest) for part in parts))
            case Repeat(part, minimum, maximum) if _is_long(expression):
                return counted_letters(
                    part.parts if isinstance(part, Alternation) else (part,),
                    minimum,
                    maximum,
                    () if rest == Concat(()) else (self._named(rest),),
                    prefix=f"{self._new_rule().name}x",
                    rules=self.rules,
                )
            case Repeat(part, minimum, int(maximum)) if maximum * size_of(part) <= _MAX_UNROLLED:
                return self._counted(part, minimum, maximum, rest)
            case Repeat(part, minimum, None) if self._may_unfold(expression):
                again = self._new_rule()
                first = self.followed(part, again)
                if not minimum:
                    self.rules[again.name] = Alternation((first, rest))
                    return again
                # The first iteration is required.
                loop = self._named(first)
                self.rules[again.name] = Alternation((loop, rest))
                following: Expression = loop
                for _ in range(minimum - 1):
                    following = self.followed(part, following)
                return following
        return _joined(expression, rest)

    def _may_unfold(self, loop: Repeat) -> bool:
        # An iteration that may be empty would recurse without end.
        return not _may_be_empty(loop.part) and (
            loop.minimum <= 1 or size_of(loop) <= _MAX_UNROLLED
        )

    def _counted(
        self, part: Expression, minimum: int, maximum: int, rest: Expression
    ) -> Expression:
        rest = following = self._named(rest)
        for round_ in range(maximum - 1, -1, -1):
            following = self.followed(part, following)
            if round_ >= minimum:
                following = Alternation((following, rest))
            if round_:
                following = self._named(following)
        return following

    def _named(self, expression: Expression) -> Expression:
        """Return a rule for an expression that is used more than once."""
        if isinstance(expression, Rule | Characters | Text) or expression == Concat(()):
            return expression
        rule = self._new_rule()
        self.rules[rule.name] = expression
        return rule

    def _new_rule(self) -> Rule:
        rule = Rule(f"{self._prefix}{len(self.rules)}")
        # Reserves the name, which nested loops must not take.
        self.rules[rule.name] = rule
        return rule


def counted_letters(
    letters: tuple[Expression, ...],
    minimum: int,
    maximum: int | None,
    end: tuple[Expression, ...],
    *,
    prefix: str,
    rules: dict[str, Expression],
) -> Expression:
    """Return `minimum` to `maximum` letters and the end after them.

    A letter is any of `letters`, each of which matches a letter. The names of rules added to
    `rules` begin with `prefix`; calls with the same letters and end may share it.
    """
    chain = _LetterChain(letters, end, prefix, rules)
    if maximum is not None and maximum <= MAX_CHAIN:
        return chain.letters(minimum, maximum)
    if maximum is None and minimum <= MAX_CHAIN:
        return chain.letters(minimum, None)
    size = _BLOCK if minimum < 2 * _BLOCK else _LARGE_BLOCK
    num_required, num_left = divmod(minimum, size)
    if minimum < 2 * _BLOCK:
        num_required, num_left = 0, minimum
    num_blocks, most = num_required, None
    if maximum is not None:
        num_blocks = max(num_required, (maximum - size - _MOST_PER_TOKEN) // size)
        most = maximum - size * num_blocks
    block = chain.block(size)
    blocks = Repeat(block, num_required, num_blocks)
    whole = Concat((blocks, chain.letters(num_left, most)))
    if not num_required:
        return whole
    # Nothing follows a required block but another block, so the same letters are in blocks that
    # begin half a block later, too.
    half = size // 2
    if most is not None and num_blocks == num_required:
        most += half
    rest = chain.letters(num_left + half, most)
    later = Repeat(block, num_required - 1, num_required - 1)
    return Alternation((whole, Concat((chain.block(half), later, rest))))


class _LetterChain:
    """Rules of a number of letters, each of which refers to the rule of one letter less."""

    def __init__(
        self,
        letters: tuple[Expression, ...],
        end: tuple[Expression, ...],
        prefix: str,
        rules: dict[str, Expression],
    ) -> None:
        self._letters = letters
        self._end = end
        self._prefix = prefix
        self._rules = rules

    def block(self, size: int) -> Rule:
        """Return exactly this many letters."""
        for number in range(1, size + 1):
            following = (self._rule("block", number - 1),) if number > 1 else ()
            self._add(self._rule("block", number), following, None)
        return self._rule("block", size)

    def letters(self, minimum: int, maximum: int | None) -> Rule:
        """Return `minimum` to `maximum` letters, and the end."""
        rule = self._rule("upto", "any" if maximum is None else 0)
        self._add(rule, (rule,) if maximum is None else None, self._end)
        for number in range(1, 1 if maximum is None else maximum - minimum + 1):
            following, rule = rule, self._rule("upto", number)
            self._add(rule, (following,), self._end)
        for number in range(1, minimum + 1):
            following, rule = rule, Rule(f"{rule.name.partition('from')[0]}from{number}")
            self._add(rule, (following,), None)
        return rule

    def _rule(self, kind: str, number: int | str) -> Rule:
        return Rule(f"{self._prefix}{kind}{number}")

    def _add(
        self,
        rule: Rule,
        following: tuple[Expression, ...] | None,
        end: tuple[Expression, ...] | None,
    ) -> None:
        """Add a rule of a letter and `following`, or of `end`; None adds no alternative."""
        choices: list[Expression] = []
        ahead: tuple[Expression, ...] = ()
        if following is not None:
            choices += (Concat((letter, *following)) for letter in self._letters)
        if end is not None:
            ahead = tuple(part for part in end if isinstance(part, Lookahead))
            choices.append(Concat(end[: len(end) - len(ahead)]))
        choice = Alternation(tuple(choices))
        self._rules[rule.name] = Concat((choice, *ahead)) if ahead else choice


def _joined(expression: Expression, rest: Expression) -> Expression:
    if rest == Concat(()):
        return expression
    if isinstance(rest, Concat):
        return Concat((expression, *rest.parts))
    return Concat((expression, rest))


def _has_loop(expression: Expression) -> bool:
    """Return whether anything is repeated, other than single characters without limit."""
    match expression:
        case Concat(parts) | Alternation(parts):
            return any(map(_has_loop, parts))
        case Repeat(part, minimum, maximum):
            return maximum is not None or minimum > MAX_CHAIN or not isinstance(part, Characters)
    return False


def _is_long(repeat: Repeat) -> bool:
    """Return whether short parts are repeated so often that they are counted as letters."""
    most = max(repeat.minimum, repeat.maximum or 0)
    return (
        (most > MAX_CHAIN or most * size_of(repeat.part) > _MAX_UNROLLED)
        and size_of(repeat.part) <= _MAX_LETTERS
        and not _has_loop(repeat.part)
        and not _may_be_empty(repeat.part)
    )


def _may_be_empty(expression: Expression) -> bool:
    match expression:
        case Text(text):
            return not text
        case Concat(parts):
            return all(map(_may_be_empty, parts))
        case Alternation(parts):
            return any(map(_may_be_empty, parts))
        case Repeat(part, minimum, _):
            return not minimum or _may_be_empty(part)
        case Rule():
            # Rules are not looked up.
            return True
    return False


def with_shared_parts(
    rules: dict[str, Expression], start: Expression, prefix: str
) -> tuple[dict[str, Expression], Expression]:
    """Return an equal grammar in which equal rules, and equal parts, are one rule.

    The names of rules that are added begin with `prefix`.
    """
    rules, start = _with_distinct_rules(rules, start)
    parts = _Parts((*rules.values(), start), prefix)
    shared: dict[str, Expression] = {}
    for name, expression in rules.items():
        body = parts.without_shared(expression)
        shared |= parts.take_rules()
        shared[name] = body
    start = parts.without_shared(start)
    return shared | parts.take_rules(), start


def _with_distinct_rules(
    rules: dict[str, Expression], start: Expression
) -> tuple[dict[str, Expression], Expression]:
    """Return the rules without duplicates of earlier rules."""
    names: dict[Expression, str] = {}
    instead: dict[str, Rule] = {}

    def renamed(expression: Expression) -> Expression | None:
        return instead.get(expression.name) if isinstance(expression, Rule) else None

    for name, expression in rules.items():
        found = names.setdefault(replaced(expression, renamed), name)
        if found != name:
            instead[name] = Rule(found)
    # A recursive rule is used before it is read.
    distinct = {
        name: replaced(expression, renamed)
        for name, expression in rules.items()
        if name not in instead
    }
    return distinct, replaced(start, renamed)


class _Parts:
    """The parts of a grammar that become rules."""

    def __init__(self, expressions: tuple[Expression, ...], prefix: str) -> None:
        self._prefix = prefix
        self._uses: Counter[Expression] = Counter()
        self._shared: dict[Expression, Rule] = {}
        self._added: dict[str, Expression] = {}
        for expression in expressions:
            self._count(expression)

    def without_shared(self, expression: Expression) -> Expression:
        """Return an expression with references to the rules of shared parts."""
        return replaced(expression, self._shared_rule)

    def take_rules(self) -> dict[str, Expression]:
        """Return the rules that were added since the last call."""
        added, self._added = self._added, {}
        return added

    def _count(self, expression: Expression) -> None:
        if _may_be_shared(expression):
            self._uses[expression] += 1
            if self._uses[expression] > 1:
                return
        for part in _parts_of(expression):
            self._count(part)

    def _shared_rule(self, expression: Expression) -> Rule | None:
        if not (_may_be_shared(expression) and self._uses[expression] > 1):
            return None
        if expression not in self._shared:
            body = _with_parts(expression, tuple(map(self.without_shared, _parts_of(expression))))
            rule = Rule(f"{self._prefix}{len(self._shared)}")
            self._shared[expression] = rule
            self._added[rule.name] = body
        return self._shared[expression]


def _may_be_shared(expression: Expression) -> bool:
    """Return whether a part is a rule to xgrammar, too, and does not match single characters.

    Single characters are compiled for each place, as tokens may span them.
    """
    return isinstance(expression, Alternation | Repeat) and not _has_characters(expression)


def _has_characters(expression: Expression) -> bool:
    if isinstance(expression, Characters | Lookahead):
        return True
    return any(map(_has_characters, _parts_of(expression)))


def _parts_of(expression: Expression) -> tuple[Expression, ...]:
    match expression:
        case Concat(parts) | Alternation(parts):
            return parts
        case Repeat(part) | Lookahead(part):
            return (part,)
    return ()


def _with_parts(expression: Expression, parts: tuple[Expression, ...]) -> Expression:
    match expression:
        case Alternation():
            return Alternation(parts)
        case Repeat(_, minimum, maximum):
            (part,) = parts
            return Repeat(part, minimum, maximum)
    raise AssertionError


def inline_rules(
    rules: dict[str, Expression], start: Expression
) -> tuple[dict[str, Expression], Expression]:
    """Return the needed rules, and the start, with the other rules inlined.

    A rule is used by those after it, or by itself.
    """
    uses = _uses_of(rules, start)
    single = {name for name in rules if uses[name] == 1 and not _has_lookahead(rules[name])}
    bodies: dict[str, Expression] = {}
    for name, expression in rules.items():
        bodies[name] = _filled(expression, bodies, single)
    start = _filled(start, bodies, single)
    kept = _uses_of(bodies, start)
    return {name: body for name, body in bodies.items() if kept[name]}, start


def _filled(expression: Expression, bodies: dict[str, Expression], single: set[str]) -> Expression:
    filled = _with_bodies(expression, bodies, single)
    return filled if size_of(filled) <= MAX_SIZE else expression


def _with_bodies(
    expression: Expression, bodies: dict[str, Expression], single: set[str]
) -> Expression:
    match expression:
        case Rule(name):
            return bodies.get(name, expression) if name in single else expression
        case Concat(parts):
            inside: list[Expression] = []
            for part in parts:
                filled = _with_bodies(part, bodies, single)
                inside += filled.parts if isinstance(filled, Concat) else (filled,)
            return Concat(tuple(inside))
        case Alternation(parts):
            return Alternation(tuple(_with_bodies(part, bodies, single) for part in parts))
        case Repeat(part, minimum, maximum):
            return Repeat(_with_bodies(part, bodies, single), minimum, maximum)
    return expression


def _uses_of(rules: dict[str, Expression], start: Expression) -> Counter[str]:
    """Return how often each rule is used, by rules that are used themselves."""
    uses: Counter[str] = Counter()
    reached: list[Expression] = [start]
    while reached:
        for name, number in _names_in(reached.pop()).items():
            if not uses[name]:
                reached.append(rules[name])
            uses[name] += number
    return uses


def _names_in(expression: Expression, number: int = 1) -> Counter[str]:
    """Return the rules in an expression, each as often as the compiled grammar has it."""
    match expression:
        case Rule(name):
            return Counter({name: number})
        case Concat(parts) | Alternation(parts):
            found: Counter[str] = Counter()
            for part in parts:
                found.update(_names_in(part, number))
            return found
        case Repeat(part, minimum, maximum):
            return _names_in(part, number if (minimum, maximum) in ((0, 1), (0, None)) else 2)
        case Lookahead(part):
            return _names_in(part, 2)
    return Counter()


def _has_lookahead(expression: Expression) -> bool:
    match expression:
        case Lookahead():
            return True
        case Concat(parts) | Alternation(parts):
            return any(map(_has_lookahead, parts))
        case Repeat(part):
            return _has_lookahead(part)
    return False
