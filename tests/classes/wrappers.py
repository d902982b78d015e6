"""Wrapper subclasses for tests: a quantised pair, a number with a unit, one that logs its operators."""

import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only


def make(cls, inner, dtype=None):
    return torch.Tensor._make_wrapper_subclass(
        cls, inner.shape, strides=inner.stride(), dtype=dtype or inner.dtype, device=inner.device
    )


class Quantised(torch.Tensor):
    """int8 numbers and a scale per row; operators see what they stand for, and give plain tensors."""

    @staticmethod
    def __new__(cls, numbers, scale):
        return make(cls, numbers, scale.dtype)

    def __init__(self, numbers, scale):
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self):
        return ["numbers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, metadata, size, stride):
        return Quantised(inner["numbers"], inner["scale"])

    def dequantised(self):
        return self.numbers.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Quantised(args[0].numbers.detach(), args[0].scale.detach())
        args, kwargs = tree_map_only(Quantised, Quantised.dequantised, (args, kwargs or {}))
        return func(*args, **kwargs)


class Unit(torch.Tensor):
    """A tensor with an exponent of metres, which multiplication adds up: metadata that differ from result to result."""

    @staticmethod
    def __new__(cls, values, metres):
        return make(cls, values)

    def __init__(self, values, metres):
        self.values_, self.metres = values, metres

    def __tensor_flatten__(self):
        return ["values_"], self.metres

    @staticmethod
    def __tensor_unflatten__(inner, metadata, size, stride):
        return Unit(inner["values_"], metadata)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = tree_map_only(Unit, lambda unit: unit.values_, args)
        units = [arg.metres for arg in args if isinstance(arg, Unit)]
        metres = sum(units) if func is torch.ops.aten.mul.Tensor else units[0]
        return tree_map_only(torch.Tensor, lambda t: Unit(t, metres), func(*plain, **(kwargs or {})))


class Converting(Unit):
    """Gradients of another unit are taken for what they were expected to be."""

    @staticmethod
    def __tensor_unflatten__(inner, metadata, size, stride):
        return Converting(inner["values_"], metadata)

    def __coerce_same_metadata_as_tangent__(self, metadata, cls=None):
        return Converting(self.values_, metadata)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = tree_map_only(Converting, lambda unit: unit.values_, args)
        metres = next(arg.metres for arg in args if isinstance(arg, Converting))
        return tree_map_only(torch.Tensor, lambda t: Converting(t, metres), func(*plain, **(kwargs or {})))


class Logging(torch.Tensor):
    """Notes the operators that are called on it, while `notes` is true."""

    seen: list[str] = []
    notes = False

    @staticmethod
    def __new__(cls, inner):
        return make(cls, inner)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, metadata, size, stride):
        return Logging(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if Logging.notes:
            Logging.seen.append(str(func))
        plain = tree_map_only(Logging, lambda t: t.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, Logging, func(*plain[0], **plain[1]))


class Half(torch.Tensor):
    """One half of a tensor whose other half is equal; what operators give, gradients too, holds the whole."""

    @staticmethod
    def __new__(cls, part, is_half):
        size = (2 * part.shape[0], *part.shape[1:]) if is_half else part.shape
        return torch.Tensor._make_wrapper_subclass(cls, size, dtype=part.dtype, device=part.device)

    def __init__(self, part, is_half):
        self.part, self.is_half = part, is_half

    def __tensor_flatten__(self):
        return ["part"], self.is_half

    @staticmethod
    def __tensor_unflatten__(inner, metadata, size, stride):
        return Half(inner["part"], metadata)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return Half(func(args[0].part), args[0].is_half)
        given = tree_map_only(
            Half, lambda t: torch.cat([t.part, t.part]) if t.is_half else t.part, (args, kwargs or {})
        )
        return tree_map_only(torch.Tensor, lambda t: Half(t, False), func(*given[0], **given[1]))


class Packed(torch.Tensor):
    """Two rows of numbers in one: its size is in no tensor inside, and given to it."""

    @staticmethod
    def __new__(cls, packed, size, stride):
        return torch.Tensor._make_wrapper_subclass(cls, size, strides=stride, dtype=packed.dtype, device=packed.device)

    def __init__(self, packed, size, stride):
        self.packed = packed

    @classmethod
    def of(cls, values):
        return cls(torch.cat([values, values + 1]).flatten(), values.shape, values.stride())

    def __tensor_flatten__(self):
        return ["packed"], None

    @staticmethod
    def __tensor_unflatten__(inner, metadata, size, stride):
        return Packed(inner["packed"], size, stride)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        (given,) = (arg for arg in args if isinstance(arg, Packed))
        plain = tree_map_only(Packed, lambda t: t.packed, args)
        return Packed(func(*plain, **(kwargs or {})), given.shape, given.stride())


def two(*size, grad=False):
    return TwoTensor(torch.randn(size), torch.randn(size)).requires_grad_(grad)


def nested(*size, grad=False):
    return TwoTensor(two(*size), two(*size)).requires_grad_(grad)


def quantised(*size, grad=False):
    scale = torch.rand(size[0], 1) + 0.1
    return Quantised(torch.randint(-8, 8, size, dtype=torch.int8), scale).requires_grad_(grad)


def described(value):
    """All that can be told of a value, to be compared with `==`."""
    if isinstance(value, (list, tuple)):
        return [type(value), *map(described, value)]
    if not isinstance(value, torch.Tensor):
        return value
    about = [type(value), value.requires_grad, value.is_leaf, tuple(value.shape), value.stride(), value.dtype]
    if hasattr(type(value), "__tensor_flatten__"):
        names, metadata = value.__tensor_flatten__()
        return [*about, metadata, *(described(getattr(value, name)) for name in names)]
    return [*about, value.detach().tolist()]
