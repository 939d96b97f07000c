"""Rewrites loops into right-recursive rules, for which xgrammar makes masks fastest.

xgrammar turns a loop into a rule, and checks tokens that cross the end of a rule when it makes a
mask: in a loop over words that takes milliseconds. Here a loop becomes a right-recursive rule that
includes everything after the loop. Such rules are one automaton, for which xgrammar precomputes the
tokens when it compiles; a mask takes microseconds.

Of long repetitions of characters, xgrammar counts a part in its parser, for which its masks allow
tokens that its parser then rejects. Here blocks of characters are counted, and the characters that
follow them are a chain of rules longer than a block and a token: at the end of a block, the chain
allows the tokens that span it.
"""

from cluster.structured.grammar.expressions import (
    Alternation,
    Characters,
    Concat,
    Expression,
    Lookahead,
    Repeat,
    Rule,
    Text,
    size_of,
)

__all__ = ["MAX_CHAIN", "counted_letters", "with_loops_as_rules"]

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
        """Add a rule of a letter and its continuation, or the end, unless they are None."""
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
