"""`foregrad demo`: a small GPT trained on real text, eager and compiled side by side, compared to the last bit."""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence

import torch

import foregrad
from foregrad.tools.cli.screen import Screen, add_json, choose_screen, print_json

from .gpt import GPT, GPTConfig
from .measure import measure_saved_bytes
from .race import Race, Runner
from .stages import STAGES, measure_sizes, program_of
from .text import Batches, read_sources

__all__ = ["main"]

BATCH = 4
LEARNING_RATE = 1e-3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run with the command line `arguments`; 0 when every bit agrees, 1 otherwise."""
    parser = argparse.ArgumentParser(
        prog="foregrad demo",
        description="Trains a small GPT with dropout on the sources of Python's standard library, once with eager "
        "PyTorch and once compiled by foregrad, from the same start and the same random numbers. Exits with 1 unless "
        "both are equal to the last bit.",
        epilog="example: foregrad demo --steps 50",
    )
    parser.add_argument("--steps", type=_positive_int, default=200, help="training steps at most (default: 200)")
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="start no further step after so many seconds (default: 30)"
    )
    parser.add_argument("--seed", type=int, default=0, help="for the weights, the batches and the dropout (default: 0)")
    parser.add_argument("--plain", action="store_true", help="plain text, even on a terminal")
    parser.add_argument("--print", choices=STAGES, dest="stage", help="print this stage's program and stop")
    add_json(parser)
    options = parser.parse_args(arguments)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the model is small: threads gain little on idle cores, and lose tenfold on busy ones
    try:
        return _run(options, choose_screen(plain=options.plain, out=sys.stderr if options.json else None))
    finally:
        torch.set_num_threads(threads)


def _run(options: argparse.Namespace, screen: Screen) -> int:
    config = GPTConfig()
    batches = Batches(read_sources(), batch=BATCH, context=config.context, seed=options.seed)
    torch.manual_seed(options.seed)
    model = GPT(config)
    twin = copy.deepcopy(model)
    compiled = foregrad.compile(twin, backend="eager")
    if options.stage is not None:
        print(program_of(options.stage, twin, compiled, batches.draw()))  # to a file or a pager as it is
        return 0
    screen.say(_introduction(model, batches))
    race = Race(
        Runner.start("eager", model, model, rate=LEARNING_RATE, seed=options.seed),
        Runner.start("foregrad", twin, compiled, rate=LEARNING_RATE, seed=options.seed),
    )
    with screen.progress("training", options.steps) as advance:
        for done in race.run(batches.draw, steps=options.steps, seconds=options.seconds):
            advance(done, f"loss: eager {race.eager.loss:.4f}, foregrad {race.compiled.loss:.4f}")
    if race.steps < options.steps and race.difference is None:
        screen.say(f"Stopped after {options.seconds:g} s (--seconds), at step {race.steps} of {options.steps}.")
    _show_summary(screen, race, batches.draw(), as_json=options.json)
    return 0 if race.difference is None else 1


def _positive_int(text: str) -> int:
    number = int(text)
    if number < 1:
        message = f"must be at least 1, not {number}"
        raise argparse.ArgumentTypeError(message)
    return number


def _introduction(model: GPT, batches: Batches) -> str:
    weights = sum(parameter.numel() for parameter in model.parameters())
    return (
        f"A GPT of {weights:,} weights, dropout on, learns {len(batches.data):,} bytes of Python's own sources,\n"
        f"{batches.batch} x {batches.context} bytes a step on one thread: with eager PyTorch, and compiled by foregrad."
    )


def _show_summary(screen: Screen, race: Race, args: tuple[torch.Tensor, torch.Tensor], *, as_json: bool) -> None:
    eager, compiled = race.eager, race.compiled
    sizes = measure_sizes(compiled.model, args)
    owned = (*args, *eager.model.parameters(), *eager.model.buffers())
    eager_saved_bytes = measure_saved_bytes(lambda: eager.model(*args), owned=owned)
    ratio = compiled.median_step_s / eager.median_step_s
    is_timed = race.steps > 1  # the first step is the capture
    if as_json:
        print_json(
            {
                "steps": race.steps,
                "loss": {"eager": eager.loss, "foregrad": compiled.loss},
                "median_step_s": {"eager": eager.median_step_s, "foregrad": compiled.median_step_s}
                if is_timed
                else None,
                "compile_s": compiled.first_step_extra_s if is_timed else None,
                "saved_bytes": {"eager": eager_saved_bytes, "foregrad": sizes.saved_bytes},
                "operators": {"joint": sizes.joint, "forward": sizes.forward, "backward": sizes.backward},
                "difference": race.difference,
            }
        )
    rows = [
        ("steps", str(race.steps), str(race.steps)),
        ("final loss", f"{eager.loss:.6f}", f"{compiled.loss:.6f}"),
        *(
            (
                ("median step", _milliseconds(eager.median_step_s), _milliseconds(compiled.median_step_s)),
                ("median step against eager", "1.00", f"{ratio:.2f}"),
                ("capture and compile", "-", _milliseconds(compiled.first_step_extra_s)),
            )
            if is_timed
            else (("first step, with the capture", *map(_milliseconds, (eager.step_s[0], compiled.step_s[0]))),)
        ),
        ("bytes saved for backward", _mebibytes(eager_saved_bytes), _mebibytes(sizes.saved_bytes)),
        ("operators in the joint graph", "-", str(sizes.joint)),
        ("operators in the forward half", "-", str(sizes.forward)),
        ("operators in the backward half", "-", str(sizes.backward)),
        ("bitwise equal", "", "yes" if race.difference is None else "no"),
    ]
    screen.table(f"{race.steps} steps, eager against foregrad", ("", "eager", "foregrad"), rows)
    if race.difference is None:
        screen.say("Equal bit for bit: losses, parameters, gradients, optimizer state, random state.")
    else:
        screen.say(f"NOT EQUAL. First difference: {race.difference}.")


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.2f} MiB"
