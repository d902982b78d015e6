"""Tables by identity: equal objects are two keys, and no key's id is taken by another object."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from foregrad.identity import ById, IdSet


class Unhashable:
    __hash__ = None

    def __eq__(self, other: object) -> bool:
        raise AssertionError("nobody asks")


def test_neither_hash_nor_equality_is_asked() -> None:
    one, other = Unhashable(), Unhashable()
    table = ById([(one, 1)])
    assert (one in table, other in table, table[one], table.get(other), table.get(other, 2)) == (
        True,
        False,
        1,
        None,
        2,
    )
    assert table.setdefault(one, 3) == 1
    assert table.setdefault(other, 3) == 3
    assert [key is which for key, which in zip(table, (one, other), strict=True)] == [True, True]
    assert table.pop(one) == 1
    with pytest.raises(KeyError):
        table.pop(one)
    assert (len(table), list(table.values())) == (1, [3])


def test_tensors_with_the_same_numbers_are_two() -> None:
    x, y = torch.ones(2), torch.ones(2)
    both = IdSet([x, y, x])
    assert (len(both), x in both, torch.ones(2) in both) == (2, True, False)
    assert IdSet([x]) <= both
    assert not both <= IdSet([x])
    assert len(IdSet([x]) | [y, y]) == 2
    both.discard(x)
    both.discard(x)
    assert [item is y for item in both] == [True]


@pytest.mark.parametrize("made", [lambda key: ById([(key, 1)]), lambda key: IdSet([key])], ids=["a table", "a set"])
def test_a_key_stays_alive_as_long_as_the_table(made) -> None:
    key = Unhashable()
    table, gone = made(key), weakref.ref(key)
    del key
    gc.collect()
    assert gone() is not None
    del table
    gc.collect()
    assert gone() is None


def test_the_order_is_that_of_the_first_coming() -> None:
    keys = [Unhashable() for _ in range(3)]
    table: ById[Unhashable, int] = ById((key, at) for at, key in enumerate(keys))
    table[keys[0]] = 5
    assert list(table.values()) == [5, 1, 2]
    assert next(reversed(table)) is keys[2]
    assert list((table | ById([(keys[1], 7)])).values()) == [5, 7, 2]
