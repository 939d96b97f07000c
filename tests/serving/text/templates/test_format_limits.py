"""Formats that are accepted make no large text, and formats without a width are accepted."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import example, given
from hypothesis import strategies as st

from cluster.serving.text.templates.format_limits import check_brace_format, check_percent_format
from cluster.serving.text.templates.rendering_budget import TemplateLimitError

LARGEST_FIELD = 999 + 999 + 310
"""A number such as 1e308 with the largest width and precision."""
FORMS = st.text("%(a)*-+ #.0123456789hldsfx{}:!r<>\uff11\uff12\uff19\u0661", max_size=24)
LITERALS = st.text("a*0123456789.[]()# \n", max_size=12)


def is_accepted(form: str, *, is_brace: bool) -> bool:
    try:
        if is_brace:
            check_brace_format(form, ("x", 1.5))
        else:
            check_percent_format(form, {"a": 1, "": 1})
    except TemplateLimitError:
        return False
    return True


@given(FORMS)
@example("%0099999d")
@example("%(a)-+ #099999.5d")
@example("%.99999hd")
@example("%%%99999d")
def test_an_accepted_percent_format_makes_no_large_text(form: str) -> None:
    if is_accepted(form, is_brace=False):
        for value in (1, "x"):
            with suppress(ValueError, TypeError, KeyError, OverflowError):
                assert len(form % {"a": value, "": value}) <= len(form) * LARGEST_FIELD


@given(FORMS)
@example("{0:99999}")
@example("{a!r:>\uff11\uff12\uff19\u0661\u0661\u0661}")
@example("{0:{0}}")
def test_an_accepted_brace_format_makes_no_large_text(form: str) -> None:
    with suppress(ValueError):
        if is_accepted(form, is_brace=True):
            with suppress(TypeError, KeyError, IndexError, OverflowError):
                assert len(form.format(99, "x", a=1.5)) <= len(form) * LARGEST_FIELD


@given(st.lists(LITERALS, min_size=1), st.sampled_from(["%s", "%(a)s", "%5d", "%-3s", "%%"]))
def test_text_beside_percent_fields_does_not_matter(texts: list[str], field: str) -> None:
    assert is_accepted(field.join(texts), is_brace=False)


@given(
    st.lists(LITERALS, min_size=1), st.sampled_from(["{}", "{0}", "{a}", "{:>5}", "{{", "}}{{a.b"])
)
def test_text_beside_brace_fields_does_not_matter(texts: list[str], field: str) -> None:
    assert is_accepted(field.join(texts), is_brace=True)
