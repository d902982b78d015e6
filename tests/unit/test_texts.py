"""The bytecode of a line proves that the text of a number goes into one call, on each Python."""

import sys

import pytest

from foregrad.python.texts import Texts


class Number:
    """Gives a mark for its text wherever it may."""

    def __init__(self, texts):
        self.texts = texts

    def __format__(self, spec):
        return self.texts.mark(self, "", spec) or format(1.5, spec)

    def __repr__(self):
        return self.texts.mark(self, "r", "") or "1.5"

    def __str__(self):
        return self.texts.mark(self, "s", "") or "1.5"


class Teller:
    """A call that takes the marks in its arguments."""

    def __init__(self):
        self.texts = Texts(set(), Number.__str__.__code__)
        self.took = []

    def __call__(self, *args, **kwargs):
        frame = sys._getframe(1)
        self.took.append("Text" in {type(self.texts.take(frame, arg)).__name__ for arg in args})


class Keeper(Teller):
    """A call that takes the marks in containers too."""

    def __call__(self, *args, **kwargs):
        frame = sys._getframe(1)
        self.took.append([self.texts.take_inside(frame, arg) for arg in args])


def in_a_closure(say, n):
    step = 1

    def inner():
        say(f"{step} {n:.3f}", step)

    inner()


def with_a_choice(say, n):
    say(f"{n}" + "a" + ("b" if n else ""))
    assert say.took


def unpacked(say, n):
    def first(texts):
        a, _ = texts
        return a

    say(first(f"{v:.3f}" for v in (n, n)))


WHOLE = [
    lambda say, n: say(f"a {n:.3f}"),
    lambda say, n: say("x", f"{n}", 1, sep=""),
    lambda say, n: say(f"{n!r} {n!s} {[n]}"),
    lambda say, n: say(f"a {n:{len('12345678')}.{1 + 1}f} {3}", len("a"), n.texts),
    lambda say, n: say("{:.3f} {q}".format(n, q=n)),  # noqa: UP032
    lambda say, n: say(f"{n:.2f} {f'{n:.1f}'}", end="a".upper()),
    lambda say, n: say(f"{3} {[n, {'a': n}]}"),
    lambda say, n: say(f"{n}" + "a"),
    in_a_closure,
    with_a_choice,
]
LOOKED_AT = [
    lambda say, n: (lambda text: say(text))(f"a {n:.3f}"),
    lambda say, n: say(f"{f'{n:.3f}':>20}"),
    lambda say, n: say(f"{n!r:>20}"),
    lambda say, n: say(f"{n}" * 2),
    lambda say, n: say(f"{n}" + "a".upper()),
    lambda say, n: say(f"{n}".upper()),
    lambda say, n: say(",".join([f"{n}"])),
    lambda say, n: say(f"{n}" or 1),
    lambda say, n: say("{!r:>20}".format(n)),  # noqa: UP032
    lambda say, n: say(f"{f'{n}'!r}"),
    lambda say, n: say(format(n, ".3f")),
    lambda say, n: say(*[f"{n}"]),
    unpacked,
]


@pytest.mark.parametrize("line", WHOLE)
def test_a_call_takes_text_that_goes_nowhere_else(line):
    say = Teller()
    line(say, Number(say.texts))
    assert say.took == [True]
    assert not say.texts.refuse_rest()


def test_a_call_takes_text_in_containers_that_are_made_there():
    keep, old = Keeper(), [1]
    number = Number(keep.texts)
    keep([f"a {number}", old], {"b": (f"{number:.3f}", 2), 3: old})
    assert not keep.texts.refuse_rest()
    (first, second) = keep.took[0]
    assert [type(first[0]).__name__, type(second["b"][0]).__name__] == ["Text", "Text"]
    assert first[1] is old
    assert second[3] is old


@pytest.mark.parametrize(
    "line", [lambda keep, n: keep({f"{n}": 1}), lambda keep, n: keep({f"{n}"}), lambda keep, n: keep([f"{n}"][0])]
)
def test_keys_and_sets_and_items_have_no_mark(line):
    keep = Keeper()
    line(keep, Number(keep.texts))
    assert "Text" not in repr([type(x) for x in keep.took[0]])
    assert keep.texts.refuse_rest() or "1.5" in repr(keep.took)


@pytest.mark.parametrize("line", LOOKED_AT)
def test_text_that_is_looked_at_has_no_mark(line):
    say = Teller()
    line(say, Number(say.texts))
    assert say.took == [False]


def test_a_call_that_took_a_mark_elsewhere_gets_none_again():
    say, taken = Teller(), []

    def line():
        taken.append(f"{Number(say.texts)}")

    line()
    assert taken[0] != "1.5"
    assert say.texts.refuse_rest()
    again = Texts(say.texts.refused, Number.__str__.__code__)
    say.texts = again
    line()
    assert taken[1] == "1.5"
    assert not again.refuse_rest()


def test_a_mark_of_a_line_is_not_taken_at_another_call():
    say, kept = Teller(), []
    kept.append(f"{Number(say.texts)}")
    say(kept[0])
    assert say.took == [False]
