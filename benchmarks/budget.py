"""Memory budgets: the measured peak of a step, what is computed again, how long a plan takes; PyTorch's beside ours.

    python -m benchmarks.budget                  # all of them, an hour
    python -m benchmarks.budget gpt2-96
    python -m benchmarks.budget --inductor       # the first three with Inductor inside
    python -m benchmarks.budget mlp-200 --out benchmarks

Peaks are bytes in use at once during forward and backward, beyond what was in use before, by the allocator's reports;
gradients count. FLOPs are counted in the graphs (by hand: by `FlopCounterMode`), beyond those of a step that saves everything.
PyTorch's plans (`activation_memory_budget`, a fraction of its estimate of saved bytes) are made by its partitioner on
our joint graph, and both run on our eager backend, which frees each value after its last use. Our plans are found once a
model; at one budget it is checked that `memory_budget=` gives the same.
"""

from __future__ import annotations

import argparse
import functools
import gc
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from functorch.compile import min_cut_rematerialization_partition as torch_min_cut
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential
from torch.utils.flop_counter import FlopCounterMode

import foregrad
from benchmarks.common import Section, write_results
from benchmarks.memory import MIB, peak_of
from benchmarks.models import Built, bert, first_tensor, resnet
from foregrad.budget.within import Frontier, can_replay
from foregrad.partitioners.costs import flops
from foregrad.partitioners.index import JointIndex, merge_equal
from foregrad.partitioners.split import split

__all__ = ["DEFAULT", "WITH_INDUCTOR", "collect", "collect_inductor"]

DEFAULT = ["gpt2-6", "gpt2-24", "gpt2-96", "llama-24", "bert-12", "resnet-50", "mlp-200", "mlp-800"]
WITH_INDUCTOR = {"gpt2-6": (0.75, 0.5, 0.25, 0.0), "gpt2-24": (0.5, 0.25), "gpt2-96": (0.25,)}
POINTS = 12
TORCH_BUDGETS = (0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
TORCH_BUDGETS_OF_MANY = (0.5, 0.2, 0.05)  # of more than 24 layers: minutes each


def gpt2(layers: int) -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, n_embd=64, n_head=4, n_positions=128, vocab_size=512, use_cache=False,
                        bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    return _language_model(GPT2LMHeadModel(config))


def llama(layers: int) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=64, intermediate_size=176, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    return _language_model(LlamaForCausalLM(config))


def _language_model(model: Any) -> Built:
    model.loss_type = "ForCausalLM"
    ids = torch.randint(0, 512, (8, 128))
    return model, (ids,), {"attention_mask": torch.zeros(8, 1, 128, 128), "labels": ids.clone()}


def mlp(layers: int) -> Built:
    parts = [part for _ in range(layers) for part in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*parts), (torch.randn(4096, 64),), {}


def bert_without_dropout(layers: int) -> Built:
    """PyTorch's partitioner would draw the masks a second time, and other ones, in a graph of ours."""
    module, args, kwargs = bert(layers)
    return module.eval(), args, kwargs


MODELS: dict[str, Callable[[int], Built]] = {
    "gpt2": gpt2,
    "llama": llama,
    "mlp": mlp,
    "bert": bert_without_dropout,
    "resnet": resnet,
}


class Loss(nn.Module):
    """A model's loss, or the mean of its output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = first_tensor(self.model(*args, **kwargs))
        return out if out.ndim == 0 else out.mean()


def build(name: str) -> Built:
    kind, _, layers = name.partition("-")
    torch.manual_seed(0)
    model, args, kwargs = MODELS[kind](int(layers))
    return Loss(model), args, kwargs


def _step(call: Callable[..., Any], built: Built) -> Callable[[], None]:
    module, args, kwargs = built

    def step() -> None:
        for parameter in module.parameters():
            parameter.grad = None
        call(*args, **kwargs).backward()

    def whole() -> None:
        step()
        for parameter in module.parameters():
            parameter.grad = None

    return whole


def _graph_flops(call: Any) -> int:
    """FLOPs of both halves of a compiled function."""
    (specialization,) = call.foregrad.specializations
    parts = specialization.product.compiled.partitioned
    return sum(flops(node) for half in (parts.forward, parts.backward) for node in half.graph.nodes)


_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # which the counter does not know


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _measure(call: Callable[..., Any], built: Built) -> tuple[int, int]:
    """(peak, FLOPs) of a step."""
    step = _step(call, built)
    step()
    peak = peak_of(step, "cpu")
    if hasattr(call, "foregrad"):
        return peak, _graph_flops(call)
    with FlopCounterMode(display=False, custom_mapping={_ATTENTION: _attention_flops}) as counter:
        step()
    return peak, int(counter.get_total_flops())


def _by_hand(name: str, built: Built) -> tuple[int, int] | None:
    """Eager PyTorch with checkpoints where its users put them: round each layer, or every root of the layers."""
    kind, _, layers = name.partition("-")
    module: Any = built[0]
    if kind in {"gpt2", "llama"}:
        module.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        module.train()
        try:
            return _measure(module, built)
        finally:
            module.model.gradient_checkpointing_disable()
    if kind == "mlp":
        segments = round(int(layers) ** 0.5)

        def call(x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = checkpoint_sequential(module.model, segments, x, use_reentrant=False)
            return out.mean()

        return _measure(call, built)
    return None


def plans_of(built: Built) -> tuple[Frontier, float]:
    """Our plans, and the CPU seconds that it takes to find them and the one for a budget."""
    module, args, kwargs = built
    joint = foregrad.capture(module, *args, **kwargs)
    index = JointIndex(joint.module, joint.signature.num_forward_outputs)
    merge_equal(index)
    index.replays = can_replay(index)
    gc.collect()
    start = time.process_time()
    plans = Frontier(index)
    plans.best(plans.bytes_of(0.5))
    return plans, time.process_time() - start


def _planned(plans: Frontier, budget: int, module: nn.Module) -> Any:
    """`module` compiled under the plan for `budget`."""
    plan = plans.best(budget)

    def partition(joint: Any, _inputs: Any, *, num_fwd_outputs: int) -> Any:
        index = JointIndex(joint, num_fwd_outputs)
        merge_equal(index)
        index.replays = can_replay(index)
        assert [node.name for node in index.nodes] == [node.name for node in plans.index.nodes]
        halves = split(index, [index.nodes[i] for i in plan.residuals])
        return halves.forward, halves.backward

    return foregrad.compile(module, backend="eager", partition=partition)


def collect_inductor(models: list[str]) -> Section:
    """The peaks of steps that Inductor compiled, with and without a budget."""
    section = Section(
        "A memory budget with Inductor inside",
        "Peak MiB of a step that Inductor compiled, and its budget.",
        ["model", "budget", "peak", "peak/budget", "without a budget"],
    )
    for name in models:
        built = build(name)
        without = peak_of(_warm(foregrad.compile(built[0], backend="inductor"), built), "cpu")
        for fraction in WITH_INDUCTOR[name]:
            call: Any = foregrad.compile(built[0], backend="inductor", memory_budget=fraction)
            peak = peak_of(_warm(call, built), "cpu")
            (specialization,) = call.foregrad.specializations
            outcome = specialization.product.compiled.partitioned.forward.meta["memory_budget"]
            budget = outcome.budget  # of Inductor's own graph
            section.add(
                [name, f"{budget / MIB:.2f}", f"{peak / MIB:.2f}", f"{peak / budget:.3f}", f"{without / MIB:.2f}"],
                model=name, budget=budget, peak=peak, without=without,
            )  # fmt: skip
    return section


def _warm(call: Callable[..., Any], built: Built) -> Callable[[], None]:
    step = _step(call, built)
    step()
    return step


def collect(name: str) -> Section:
    """The table of one model."""
    built = build(name)
    module = built[0]
    parameters = sum(p.numel() * p.element_size() for p in module.parameters())
    eager_peak, eager_flops = _measure(module, built)
    plans, seconds = plans_of(built)
    saving = _measure(foregrad.compile(module, backend="eager", partition="default"), built)[1]
    index = plans.index
    forward = sum(flops(node) for node, bit in zip(index.nodes, index.in_forward, strict=True) if bit)
    section = Section(
        f"A memory budget: {name}",
        f"Peak MiB of a step. Eager {eager_peak / MIB:.2f}, of which gradients {parameters / MIB:.2f}; a plan found in "
        f"{seconds:.2f} s. `again`: FLOPs computed again, over the forward's; `activations`: the peak less the "
        "gradients, over that of saving everything.",
        ["who", "budget", "peak", "peak/budget", "simulated/measured", "activations", "again"],
    )
    most = plans.most - parameters

    def add(who: str, budget: str, peak: int, count: int, limit: int | None, simulated: int | None) -> None:
        again = (count - (eager_flops if who == "by hand" else saving)) / forward
        section.add(
            [who, budget, f"{peak / MIB:.2f}", f"{peak / limit:.3f}" if limit else "-",
             f"{simulated / peak:.4f}" if simulated else "-", f"{(peak - parameters) / most:.3f}", f"{again:.3f}"],
            who=who, budget=budget, peak=peak, again=again, limit=limit, seconds=seconds,
        )  # fmt: skip

    hand = _by_hand(name, built)
    if hand:
        add("by hand", "-", *hand, None, None)
        if hand[0] >= plans.least:
            add("foregrad", f"{hand[0] / MIB:.2f}", *_measure(_planned(plans, hand[0], module), built), hand[0],
                plans.best(hand[0]).peak)  # fmt: skip
    for k in range(POINTS):
        budget = plans.bytes_of(1 - k / (POINTS - 1))
        peak, count = _measure(_planned(plans, budget, module), built)
        if k == POINTS // 2:
            public = foregrad.compile(module, backend="eager", memory_budget=budget)
            assert _measure(public, built) == (peak, count), "memory_budget= gives another plan"
        add("foregrad", f"{budget / MIB:.2f}", peak, count, budget, plans.best(budget).peak)
    layers = int(name.partition("-")[2])
    for fraction in (
        TORCH_BUDGETS_OF_MANY if layers > 24 and not name.startswith(("resnet", "mlp-200")) else TORCH_BUDGETS
    ):
        with torch._functorch.config.patch(activation_memory_budget=fraction):
            call = foregrad.compile(
                module, backend="eager", partition=functools.partial(torch_min_cut, compiler="eager")
            )
            peak, count = _measure(call, built)
        add("PyTorch", f"{fraction}", peak, count, None, None)
        if peak >= plans.least:  # ours at the peak that PyTorch's plan really has
            ours = _planned(plans, peak, module)
            add("foregrad", f"{peak / MIB:.2f}", *_measure(ours, built), peak, plans.best(peak).peak)
    return section


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--inductor", action="store_true")
    parser.add_argument("--out", type=Path, help="folder of the results")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    foregrad.config.cache = False  # each plan is made anew
    for name in options.models or (WITH_INDUCTOR if options.inductor else DEFAULT):
        print(f"==> {name}", flush=True)
        section = collect_inductor([name]) if options.inductor else collect(name)
        if options.out:
            write_results([section], options.out)


if __name__ == "__main__":
    main()
