"""Tensors that a function moves from one place of its own to another: each is read where it was before the call."""

import collections

import pytest
import torch

import foregrad


class Holder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 2)
        self.before, self.now = torch.zeros(1, 2), torch.ones(1, 2)
        self.named = {"a": torch.zeros(1, 2), "b": torch.ones(1, 2)}
        self.items = [torch.zeros(1, 2), torch.ones(1, 2)]
        self.queue = collections.deque([torch.zeros(1, 2), torch.ones(1, 2)], maxlen=2)

    def state(self):
        return [self.before, self.now, *self.named.values(), *self.items, *self.queue]


def shift_attributes(m, x, y):
    m.before, m.now = m.now, y.detach()
    return y + m.before


def swap_attributes(m, x, y):
    m.before, m.now = m.now + 1, m.before
    return y + m.before * 2 + m.now


def swap_in_dict(m, x, y):
    m.named["a"], m.named["b"] = m.named["b"], m.named["a"]
    return y + m.named["a"] * 2


def shift_in_dict(m, x, y):
    m.named["a"], m.named["b"] = m.named["b"], y.detach()
    return y + m.named["a"]


def swap_in_list(m, x, y):
    m.items[0], m.items[1] = m.items[1], m.items[0]
    return y + m.items[0] * 2


def append_and_pop(m, x, y):
    m.items.append(y.detach())
    m.items.pop(0)
    return y + m.items[0]


def delete_first(m, x, y):
    m.items.append(y.detach())
    del m.items[0]
    return y + m.items[0]


def write_a_slice(m, x, y):
    m.items[:] = [*m.items[1:], y.detach()]
    return y + m.items[0]


def insert_first(m, x, y):
    m.items.insert(0, y.detach())
    m.items.pop()
    return y + m.items[1]


def reverse(m, x, y):
    m.items.reverse()
    return y + m.items[0] * 2


def push(m, x, y):
    m.queue.append(y.detach())
    return y + m.queue[0]


def push_left(m, x, y):
    m.queue.appendleft(y.detach())
    return y + m.queue[1]


def rotate(m, x, y):
    m.queue.rotate(1)
    return y + m.queue[0]


def pop_left(m, x, y):
    first = m.queue.popleft()
    m.queue.append(y.detach())
    return y + first


def push_and_read_all(m, x, y):
    m.queue.append(y.detach())
    return y + torch.stack(list(m.queue)).sum(0)


PROGRAMS = [
    shift_attributes, swap_attributes, swap_in_dict, shift_in_dict, swap_in_list, append_and_pop, delete_first,
    write_a_slice, insert_first, reverse, push, push_left, rotate, pop_left, push_and_read_all,
]  # fmt: skip


def _run(program, moves_first, wrap):
    module = Holder()

    def function(x):
        if moves_first:  # before any parameter is looked for
            return program(module, x, x.sum(1, keepdim=True).expand(1, 2)) + module.linear(x)
        return program(module, x, module.linear(x))

    wrapped = wrap(function)
    results = [wrapped(torch.full((1, 4), float(i))).detach().clone() for i in range(5)]
    return results, module.state()


@pytest.mark.parametrize("moves_first", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_as_in_eager(program, moves_first):
    expected = _run(program, moves_first, lambda f: f)
    found = _run(program, moves_first, lambda f: foregrad.compile(f, backend="eager", on_unsupported="eager"))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
