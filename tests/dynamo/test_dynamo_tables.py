"""What Dynamo learns of torch's functions while a capture has some replaced."""

from __future__ import annotations

import torch
from torch._dynamo import trace_rules

from foregrad._torch.dynamo_off import forget_replacements, note_tables


def test_tables_made_while_functions_are_replaced_are_made_again(monkeypatch):
    trace_rules.get_tensor_method.cache_clear()
    note_tables()
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "set_", lambda *_: None)
        meanwhile = trace_rules.get_tensor_method()
    forget_replacements()
    assert trace_rules.get_tensor_method() is not meanwhile
    assert torch.Tensor.set_ in trace_rules.get_tensor_method()


def test_tables_that_were_made_before_are_kept():
    before = trace_rules.get_tensor_method()
    note_tables()
    forget_replacements()
    assert trace_rules.get_tensor_method() is before
