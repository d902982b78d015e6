"""The part of `torch.distributed` that a plan asks: the ranks of a group, groups without processes, and modules that
`fully_shard` and `DistributedDataParallel` have changed, as they were. Checked on torch 2.13.0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .._torch.nested import mapped


def ranks_in(group: Any) -> tuple[int, ...]:
    """The ranks in the process group of a name."""
    from torch._C._distributed_c10d import _resolve_process_group

    return tuple(torch.distributed.get_process_group_ranks(_resolve_process_group(group)))


@contextlib.contextmanager
def without_processes(size: int, rank: int) -> Iterator[None]:
    """Context: `torch.distributed` has so many ranks, and collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@dataclasses.dataclass(frozen=True, slots=True)
class Sharding:
    """How `fully_shard` shards a module: the path of each group of parameters, the sizes of its mesh, whether a group
    is let go after its forward, and the dtypes of shards and of reductions.
    """

    paths: tuple[str, ...]
    shards: int
    copies: int
    reshard: bool
    sharded_dtype: torch.dtype
    reduce_dtype: torch.dtype | None


def replicated(module: Any) -> tuple[Any, int] | None:
    """The module inside a `DistributedDataParallel`, and how many copies there are; None for any other."""
    cls: Any = getattr(sys.modules.get("torch.nn.parallel.distributed"), "DistributedDataParallel", None)
    return (module.module, module.process_group.size()) if cls is not None and isinstance(module, cls) else None


class _Copy(torch.nn.Module):
    """A `DistributedDataParallel` without other processes."""

    module: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def _sharded_groups(module: Any) -> list[tuple[str, Any, Any, Any]]:
    """(path, module, state, group of parameters) of each module that `fully_shard` was called on."""
    cls: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    found = []
    for path, part in module.named_modules() if cls is not None and isinstance(module, torch.nn.Module) else ():
        if isinstance(part, cls):
            state = part._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            found += [(path, part, state, group) for group in groups if group is not None]
    return found


def sharding_of(module: Any) -> Sharding | None:
    """How a module is sharded; None where `fully_shard` was not called."""
    groups = _sharded_groups(module)
    if not groups:
        return None
    paths = tuple(path for path, *_ in groups)
    inner = [group for path, _, _, group in groups if path] or [group for *_, group in groups]
    mesh, policy = inner[0].mesh_info, inner[0].mp_policy
    return Sharding(
        paths,
        getattr(mesh, "shard_mesh_size", 1),
        getattr(mesh, "replicate_mesh_size", 1),
        any(group.post_forward_mesh_info is not None for group in inner),
        inner[0].fsdp_params[0].sharded_param.dtype,
        policy.reduce_dtype,
    )


@contextlib.contextmanager
def unsharded(module: Any) -> Iterator[None]:
    """Context: a module that `fully_shard` was called on computes as it did before, with whole parameters on `meta`, or
    fakes of the kind that its shards are, in its dtype of computation; a `DistributedDataParallel` calls its module.
    """
    with contextlib.ExitStack() as after:
        if replicated(module) is not None:
            after.callback(setattr, module, "__class__", type(module))
            module.__class__ = _Copy
        for _, part, state, group in _sharded_groups(module):
            for name in ("_forward_pre_hooks", "_forward_hooks"):
                hooks = getattr(part, name)
                after.callback(setattr, part, name, hooks)
                others = {k: hook for k, hook in hooks.items() if getattr(hook, "__self__", None) is not state}
                if name == "_forward_pre_hooks" and (own := [k for k in hooks if k not in others]):
                    others = {own[0]: _casting(group.mp_policy), **others}
                setattr(part, name, type(hooks)(others))
            cls = type(part)
            if (base := _plain_class(cls)) is not cls:
                after.callback(setattr, part, "__class__", cls)
                part.__class__ = base
            for one in group.fsdp_params:
                whole: Any = _whole(one, group.mp_policy.param_dtype)
                whole.shard = one.sharded_param
                info = one._module_info
                places = [
                    (info.module, info.param_name),
                    *zip(info.shared_modules, info.shared_param_names, strict=True),
                ]
                for owner, name in places:
                    after.callback(owner._parameters.__setitem__, name, owner._parameters[name])
                    owner._parameters[name] = whole
        yield


def shard_of(tensor: Any) -> torch.Tensor:
    """The parameter of `fully_shard` that a whole parameter stands for; a tensor itself for any other tensor."""
    found: torch.Tensor = getattr(tensor, "shard", tensor)
    return found


def _casting(policy: Any) -> Callable[..., Any]:
    """The hook that casts the arguments of a forward as `fully_shard` does."""
    dtype = policy.param_dtype if policy.cast_forward_inputs else None

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    return lambda _module, args, kwargs: (mapped(args, torch.Tensor, cast), mapped(kwargs, torch.Tensor, cast))


def _plain_class(cls: type) -> type:
    sharded: Any = sys.modules["torch.distributed.fsdp"].FSDPModule
    return cls.__bases__[1] if len(cls.__bases__) > 1 and cls.__bases__[0] is sharded else cls


def _whole(one: Any, dtype: torch.dtype | None) -> torch.nn.Parameter:
    """The parameter that a shard is of."""
    shard = one.sharded_param
    local = shard.to_local()
    data: Any = local.new_empty(one._orig_size, dtype=dtype or shard.dtype)
    if one.is_dtensor:
        spec = getattr(one, "_unsharded_dtensor_spec", None) or one._tp_spec
        data = type(shard)(data, spec, requires_grad=False)
    return torch.nn.Parameter(data, requires_grad=shard.requires_grad)
