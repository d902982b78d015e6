"""The program of a fault has the inputs that show it, of every kind of tensor."""

from __future__ import annotations

import pytest
import torch

from foregrad.tools.verification.reproducer import _stored

KINDS = {
    "complex128": lambda: torch.randn(3, 2, dtype=torch.complex128).t(),
    "complex32": lambda: torch.ones(2, dtype=torch.complex32) * 1j,
    "conjugate": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "compressed rows": lambda: torch.eye(3, dtype=torch.complex64).to_sparse_csr(),
    "strided": lambda: torch.randn(4, 4)[::2, 1:].requires_grad_(),
}


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # sparse tensors, half-precision complex numbers: in beta
@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_stored_as_they_are(kind, tmp_path):
    value = KINDS[kind]()
    program = tmp_path / "program.py"
    variables = {"torch": torch, "__file__": str(program)}
    exec(_stored([value, 3], program), variables)
    stored, number = variables["inputs"]
    assert number == 3
    assert (stored.layout, stored.dtype, stored.requires_grad) == (value.layout, value.dtype, value.requires_grad)
    if value.layout is torch.strided:
        assert stored.stride() == value.stride()
    assert torch.equal(content_of(stored), content_of(value))


def content_of(tensor):
    return tensor.detach().to_dense().to(torch.complex128).resolve_conj()
