"""A whole training step compiled as one function, against eager PyTorch and against `torch.compile` of its two parts.

    python -m benchmarks.train_step --quick
    python -m benchmarks.train_step --models gpt2-6 mlp-200 --write
    python -m benchmarks.train_step --device cuda --models gpt-12 --optimizers AdamW --json found.json

Each model trains with `zero_grad()` at the end of the step, with SGD (momentum) and AdamW. With eager's kernels: peak
memory of a step against eager's, in bytes of the parameters, and its time. With Inductor: against `torch.compile(model)`
and `torch.compile(optimizer.step)`, the time of a step and the CPU seconds of cold compilation. Also the number of
graphs over 50 steps with a scheduler, and whether these end with eager's bits.

On a GPU times are wall time between two synchronizations, those of cold compilation with all of Inductor's processes,
and the peak is the allocator's. Needs torch alone for the models `gpt-...` and `mlp-...`.
"""

# ruff: noqa: ANN001, ANN002, ANN201, ANN202

import argparse
import dataclasses
import functools
import json
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.common import Section, environment, write_results
from benchmarks.inductor import GPT2, RunFailed, cpu_seconds, in_child, keep_others, peak_bytes, prepare

DEVICE = "cpu"  # of models and batches, from the command line


def gpt2(layers, width=768, dropout=0.0):
    """Layers of GPT-2's own width, a small vocabulary, 32 tokens: the parameters are larger than the activations."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, n_positions=32, vocab_size=4096, use_cache=False, n_embd=width, n_head=width // 64,
                        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0, eos_token_id=0)  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    ids, mask = torch.randint(0, 4096, (1, 32)), torch.zeros(1, 1, 32, 32)

    return model, lambda model: model(ids, attention_mask=mask, labels=ids)[0]


def gpt(layers):
    """The same without the library: GPT-2's width, 64 tokens."""
    ids = torch.randint(0, 4096, (1, 64))
    return GPT2(layers, 768, 12, 4096, 64), lambda model: model(ids)


def resnet50():
    """Full width and depth, on small images."""
    from transformers import ResNetConfig, ResNetModel

    x = torch.randn(4, 3, 64, 64)
    return ResNetModel(ResNetConfig()), lambda model: model(x)[0].square().mean()


def mlp(layers):
    blocks = [block for _ in range(layers) for block in (nn.Linear(64, 64), nn.ReLU())]
    x = torch.randn(32, 64)
    return nn.Sequential(*blocks), lambda model: model(x).square().mean()


MODELS = {
    "gpt2-6": lambda: gpt2(6),
    "gpt2-12": lambda: gpt2(12),
    "gpt2-24": lambda: gpt2(24),
    "gpt2-12-narrow": lambda: gpt2(12, 128, 0.1),
    "gpt2-24-narrow": lambda: gpt2(24, 128, 0.1),
    "gpt-12": lambda: gpt(12),
    "resnet-50": resnet50,
    "mlp-20": lambda: mlp(20),
    "mlp-50": lambda: mlp(50),
    "mlp-200": lambda: mlp(200),
}
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


def seeded(name):
    """A model and its loss, with the same numbers in each call."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return MODELS[name]()


def trainer(name, optimizer, way):
    """(one step of training, the model, the optimizer, what `compile` gave). `way`: eager, foregrad with eager's kernels
    or with Inductor, or PyTorch's two compiles.
    """
    import foregrad

    model, loss_of = seeded(name)
    made = OPTIMIZERS[optimizer](model.parameters())
    forward, update = (torch.compile(model), torch.compile(made.step)) if way == "two compiles" else (model, made.step)

    def step():
        loss = loss_of(forward)
        loss.backward()
        update()
        made.zero_grad()
        return loss.detach()

    if way.startswith("foregrad"):
        step = foregrad.compile(step, backend=way.partition(" ")[2])
    return step, model, made


def warm_up():
    """Once what any compilation needs; on a GPU in as many processes as Inductor likes."""
    if DEVICE == "cpu":
        prepare()
    else:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(64, device=DEVICE))
        torch._dynamo.reset()


def clock():
    """Seconds: of the process, or on a GPU of the wall, when all kernels have run."""
    if DEVICE == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def peak_of(step):
    """Bytes over the start of a step."""
    if DEVICE == "cpu":
        return peak_bytes(step)
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - start


def turns(steps, rounds):
    """By way: the median milliseconds of a step, in random turns."""
    times, order, shuffle = {way: [] for way in steps}, list(steps.items()), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for way, step in order:
            started = clock()
            step()
            times[way].append(1e3 * (clock() - started))
    return {way: statistics.median(values) for way, values in times.items()}


def prepared(name, optimizer, ways):
    steps, size = {}, 0
    for way in ways:
        step, model, _ = trainer(name, optimizer, way)
        for _ in range(3):
            step()
        steps[way], size = step, sum(p.nbytes for p in model.parameters())
    return steps, size


def on_eager_kernels(name, optimizer, rounds):
    """In a child: times and peaks, the peak in bytes of the parameters."""
    torch.set_num_threads(1)
    steps, size = prepared(name, optimizer, ["eager", "foregrad eager"])
    peaks = {way: peak_of(step) / size for way, step in steps.items()}
    return {"step": turns(steps, int(rounds)), "peak": peaks}


def held(name, optimizer, _):
    """In a child: peaks of the forward alone, which keeps what its backward needs, of eager's step and of ours."""
    torch.set_num_threads(1)
    forward = peak_of(functools.partial(*reversed(seeded(name))))
    steps, size = prepared(name, optimizer, ["eager", "foregrad eager"])
    return {"forward": forward / size, **{way: peak_of(step) / size for way, step in steps.items()}}


def with_inductor(name, optimizer, rounds):
    """In a child whose cache is filled: times and peaks."""
    warm_up()
    steps, size = prepared(name, optimizer, ["eager", "two compiles", "foregrad inductor"])
    peaks = {way: peak_of(step) / size for way, step in steps.items()}
    return {"step": turns(steps, int(rounds)), "peak": peaks}


def cold(name, optimizer, way):
    """In a child: seconds until the second step has run."""
    warm_up()
    step, *_ = trainer(name, optimizer, way)
    now = cpu_seconds if DEVICE == "cpu" else clock
    started = now()
    for _ in range(2 if way == "two compiles" else 3):  # the first of ours makes the optimizer's state
        step()
    return now() - started


def fifty_steps(name, optimizer, _):
    """In a child: the graphs that 50 steps take, each of two batches, with clipping and a scheduler; whether they end with
    eager's bits.
    """
    import foregrad

    torch.set_num_threads(1)
    ends = []
    for way in ("eager", "foregrad eager"):
        model, loss_of = seeded(name)
        made = OPTIMIZERS[optimizer](model.parameters())
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(made, 50)

        def step(is_last, model=model, made=made, loss_of=loss_of):
            loss = loss_of(model) / 2
            loss.backward()
            if is_last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                made.step()
                made.zero_grad()
            return loss.detach()

        call = step if way == "eager" else foregrad.compile(step, backend="eager")
        losses = []
        for _ in range(50):
            losses += [call(is_last).clone() for is_last in (False, True)]
            scheduler.step()
        ends.append([*losses, *model.state_dict().values(), *of_state(made), torch.get_rng_state()])
    equal = all(map(torch.equal, *ends))
    return {"graphs": len(foregrad.explain_recompiles(call)), "equal": equal}


def of_state(optimizer):
    return [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]


CHILDREN = {f.__name__: f for f in (on_eager_kernels, held, with_inductor, cold, fifty_steps)}


def main():
    global DEVICE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="mlp-20 with SGD, 5 rounds, unless others are given")
    parser.add_argument("--models", nargs="*", choices=list(MODELS))
    parser.add_argument("--optimizers", nargs="*", choices=list(OPTIMIZERS))
    parser.add_argument("--parts", nargs="*", choices=list(PARTS))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--patience", type=float, default=900, help="seconds for one run of one model")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", type=Path, help="a file that gets the figures as they come")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--child", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    DEVICE = arguments.device
    if arguments.child:
        kind, *rest = arguments.child
        print(json.dumps(CHILDREN[kind](*rest)))
        return
    rounds = arguments.rounds or (5 if arguments.quick else 20)
    models = arguments.models or (["mlp-20"] if arguments.quick else list(MODELS))
    optimizers = arguments.optimizers or (["SGD"] if arguments.quick else list(OPTIMIZERS))
    parts, found = arguments.parts or list(PARTS), []
    for name in models:
        for optimizer in optimizers:
            for part in parts:
                try:
                    section = PARTS[part](name, optimizer, rounds, arguments.patience)
                except RunFailed as error:
                    print(f"{name}, {optimizer}, {part} failed: {error}", flush=True)
                    continue
                found.append({**dataclasses.asdict(section), "environment": environment()})
                if arguments.json:
                    arguments.json.write_text(json.dumps(found, indent=1))
                if arguments.write:
                    keep_others(section, Path(__file__).parent / "RESULTS.json")
                    write_results([section], Path(__file__).parent)


def section_of(title, notes, columns):
    """A table. On a GPU it is another one, whose times are other times."""
    if DEVICE == "cpu":
        return Section(title, notes, columns)
    return Section(
        f"{title}, on a GPU", notes.replace("CPU milliseconds", "milliseconds").replace("CPU s", "s"), columns
    )


def with_row(section, name, optimizer, cells, found):
    step = f"{name}, {optimizer}"
    section.add([step, *cells], model=step, **found)
    return section


def child(*what, cache, patience):
    return in_child(*what, "--device", DEVICE, cache=cache, patience=patience, module="benchmarks.train_step")


def kernels(name, optimizer, rounds, patience):
    section = section_of(
        "A whole training step on eager's kernels",
        "Peak of memory over the start of a step, in bytes of the parameters, and CPU milliseconds of a step, median of "
        "turns, one thread. Freed: eager's peak less ours. Ratio: our step to eager's.",
        ["step", "eager's peak", "ours", "freed", "eager, ms", "ours, ms", "ratio"],
    )
    with tempfile.TemporaryDirectory() as cache:
        found = child("on_eager_kernels", name, optimizer, rounds, cache=cache, patience=patience)
    (theirs, ours), (slow, quick) = found["peak"].values(), found["step"].values()
    cells = [
        f"{theirs:.2f}",
        f"{ours:.2f}",
        f"{theirs - ours:.2f}",
        f"{slow:.2f}",
        f"{quick:.2f}",
        f"{quick / slow:.2f}",
    ]
    return with_row(section, name, optimizer, cells, found)


def bounds(name, optimizer, rounds, patience):
    section = section_of(
        "What a training step must hold",
        "Peaks over the start of a step, in bytes of the parameters. Forward: of the forward alone, with all that its "
        "backward needs, before there is any gradient: a step that computes nothing twice has no lower peak. Possible: "
        "eager's peak less that. Freed: eager's peak less ours.",
        ["step", "eager's peak", "forward", "ours", "possible", "freed"],
    )
    with tempfile.TemporaryDirectory() as cache:
        found = child("held", name, optimizer, rounds, cache=cache, patience=patience)
    forward, theirs, ours = found.values()
    cells = [f"{value:.2f}" for value in (theirs, forward, ours, theirs - forward, theirs - ours)]
    return with_row(section, name, optimizer, cells, found)


def graphs(name, optimizer, rounds, patience):
    section = section_of(
        "Fifty training steps with accumulation, clipping and a scheduler",
        "Each step gathers the gradients of two batches. Graphs: made over all steps, the first of which runs eagerly "
        "where it makes the optimizer's state. Equal: losses, parameters, buffers, the optimizer's tensors and the random "
        "state after 50 steps are eager's, bit for bit. Narrow: 128 wide, with dropout.",
        ["step", "graphs", "equal"],
    )
    with tempfile.TemporaryDirectory() as cache:
        found = child("fifty_steps", name, optimizer, rounds, cache=cache, patience=patience)
    cells = [str(found["graphs"]), "yes" if found["equal"] else "no"]
    return with_row(section, name, optimizer, cells, found)


def inductor(name, optimizer, rounds, patience):
    section = section_of(
        "A whole training step with Inductor against two compiles",
        "PyTorch's: `torch.compile(model)` and `torch.compile(optimizer.step)`. Cold: CPU seconds to compile, C++ compiler "
        "included, caches empty. Step: CPU milliseconds, median of turns, one thread. Peak: as above.",
        [
            "step",
            "PyTorch's cold, s",
            "ours",
            "ratio",
            "PyTorch's step, ms",
            "ours",
            "ratio",
            "peaks eager, PyTorch's, ours",
        ],
    )
    seconds = {}
    with tempfile.TemporaryDirectory() as cache:
        for way in ("two compiles", "foregrad inductor"):  # what is timed next finds their kernels
            with tempfile.TemporaryDirectory() as empty:
                seconds[way] = child("cold", name, optimizer, way, cache=empty, patience=patience)
                shutil.copytree(empty, cache, dirs_exist_ok=True)
        found = child("with_inductor", name, optimizer, rounds, cache=cache, patience=patience)
    (a, b), step = seconds.values(), found["step"]
    two, one = step["two compiles"], step["foregrad inductor"]
    peaks = ", ".join(f"{value:.2f}" for value in found["peak"].values())
    cells = [f"{a:.1f}", f"{b:.1f}", f"{b / a:.2f}", f"{two:.2f}", f"{one:.2f}", f"{one / two:.2f}", peaks]
    return with_row(section, name, optimizer, cells, {"cold": seconds, **found})


PARTS = {"kernels": kernels, "bounds": bounds, "graphs": graphs, "inductor": inductor}

if __name__ == "__main__":
    main()
