"""Text of numbers that a function prints or logs is made by each call, after its graph has run."""

import contextlib
import io
import logging
import sys
import warnings

import pytest
import torch

import foregrad
from foregrad.errors import ForegradWarning
from tests.programs import Table, compiled_alike

LOGGER = logging.getLogger("tests.python.printed_text")
compiles, is_eager = COMPILED, EAGER = Table(), Table()


@compiles
def prints_an_f_string(x, loss):
    print(f"loss {loss.item():.3f}")


@compiles
def prints_several(x, loss):
    print(
        f"step {1} {loss.item():.3f}", "and", loss.item(), f"{loss.item() * 2:>12.2e}|", sep=";", end="!\n", flush=True
    )


@compiles
def prints_the_text_of_the_tensor(x, loss):
    print(f"loss {loss:.4f}, {loss}")


@compiles
def prints_the_tensor(x, loss):
    print("loss", loss, loss.detach(), loss.double().detach())


@compiles
def prints_a_conversion(x, loss):
    print(f"{loss.item()!r} {loss.item()!s} {[loss.item(), {'a': loss.item()}]}")


@compiles
def prints_sums_of_parts_of_a_list(x, loss):
    losses, first = [loss.item(), 1.0, loss.item() * 2], 1
    print(f"{losses[0]:.3f} {sum(losses[-2:]):.3f} {sum(losses[first:]):.3f} {sum(losses[::2]):.3f}")


@compiles
def prints_a_nested_format(x, loss):
    width = 12
    print(f"{loss.item():{width}.{1 + 1}f}|{f'{loss.item():.1f}'}")


@compiles
def prints_a_format(x, loss):
    print("loss {:.3f} of {n}".format(loss.item(), n=loss.item()), "{}".format(loss))  # noqa: UP032


@compiles
def prints_in_a_loop(x, loss):
    for i in range(3):
        print(f"{i}: {(loss * i).item():.2f}", x.shape[0])


@compiles
def prints_in_a_helper(x, loss):
    _report("loss", loss.item())


def _report(name, value):
    print(f"{name}: {value:.3f}", str.upper("ok"), max(1, 2))


@compiles
def logs_an_f_string(x, loss):
    LOGGER.info(f"loss {loss.item():.3f} 100%")  # noqa: G004
    LOGGER.log(logging.WARNING, f"loss {loss:.3f}")  # noqa: G004


@compiles
def logs_below_the_level(x, loss):
    LOGGER.debug(f"loss {loss.item():.3f}")  # noqa: G004


@compiles
def keeps_the_text_until_the_print(x, loss):
    text = f"loss {loss.item():.3f}"
    if x.shape[0] > 2:
        print("[0]", text)
    for i in range(2):
        line = f"{i}: {loss.item() * i:.2f}" + (" *" if i else "")
        LOGGER.info(line)


@is_eager
def prints_a_variable_again(x, loss):
    for i in range(3):
        if i == 0:
            text = f"loss {loss.item():.3f}"
        print(text)


@is_eager
def reads_a_variable_in_a_loop(x, loss):
    text = f"loss {loss.item():.3f}"
    for i in range(2):
        print(i, text)


@is_eager
def reads_a_variable_by_its_name(x, loss):
    text = f"loss {loss.item():.3f}"
    print(len(locals()["text"]))
    print(text)


@is_eager
def reads_a_variable_twice(x, loss):
    text = f"loss {loss.item():.3f}"
    print(text)
    print(text.upper())


@is_eager
def reads_a_variable_now_and_then(x, loss):
    text = f"loss {loss.item():.3f}"
    if loss.item() > 1:
        print(text)


@is_eager
def reads_a_variable_in_a_function(x, loss):
    text = f"loss {loss.item():.3f}"
    print(max([1, 2], key=lambda i: len(text) * i))


@is_eager
def measures_the_text(x, loss):
    print(len(f"loss {loss.item():.3f}") * 10 ** int(loss.item() > 2))


@is_eager
def pads_the_text(x, loss):
    print(f"{f'{loss.item():.3f}':>30}|", f"{f'{loss.item():.1f}'!r}", f"{loss.item()!r:>20}")


@is_eager
def formats_the_text_again(x, loss):
    print("{:>30}|".format(f"{loss.item():.3f}"), "{!r:>20}".format(loss.item()))  # noqa: UP032


@is_eager
def passes_the_text_on(x, loss):
    _says(f"loss {loss.item():.3f}")


def _says(text):
    print(text.upper() if len(text) < 40 else "long")


@is_eager
def formats_with_percent(x, loss):
    print("loss %.3f" % loss.item())  # noqa: UP031


@compiles
def prints_a_choice_of_texts(x, loss):
    best = x.shape[0] > 2
    print(f"{loss.item():.3f}" if best else "none", "none" if best else f"{loss.item():.2f}", sep="|")


@compiles
def prints_a_text_and_a_choice(x, loss):
    best, name = x.shape[0] > 2, None
    print(f"loss {loss.item():.3f}" + (" *" if best and name is None else ""), end="\n" if name else ";")
    print(f"loss {loss.item():.3f}{' *' if best else ''} {f'{loss.item():.2f}' if name else name}")


@compiles
def prints_joined_parts(x, loss):
    losses, digits = {"a": loss, "b": 2 * loss}, 3
    print(", ".join(f"{name} {value.item():.{digits}f}" for name, value in losses.items()), end=" |\n")
    LOGGER.info(" ".join(f"{value:.3f}" for value in losses.values() if value.dim() == 0))


if sys.version_info < (3, 12):  # later, a list is made in the function's own loop

    @compiles
    def prints_a_joined_list(x, loss):
        print("losses:", ", ".join([f"{value.item():.3f}" for value in (loss, 2 * loss)]))


@is_eager
def looks_at_parts(x, loss):
    for part in (f"{value.item():.3f}" for value in (loss, 2 * loss)):
        print(len(part), part.startswith("-"))
    print(", ".join(filter(str.strip, (f"{value.item():.0f}" for value in (loss,)))))
    print(max(f"{value.item():.3f}" for value in (loss, 2 * loss)), [len(f"{value:.1f}") for value in (loss,)])


@is_eager
def joins_by_a_text_of_its_own(x, loss):
    class Text(str):
        __slots__ = ()

        def join(self, parts):
            return super().join(part.rjust(9) for part in parts)

    print(Text(";").join(f"{value.item():.3f}" for value in (loss, 2 * loss)))


@is_eager
def adds_a_text_to_an_object(x, loss):
    class Tail:
        def __radd__(self, text):
            return text.replace(".", ",")

    tail = Tail()
    print(f"{loss.item():.3f}" + (tail if x.dim() else ""))


@is_eager
def chooses_a_text(x, loss):
    print(f"{loss.item():.3f}" if x.dim() else "none", f"{loss.item():.3f}" or "empty")


@is_eager
def raises_with_the_text(x, loss):
    try:
        raise ValueError(f"loss {loss.item():.3f}")
    except ValueError as error:
        print(len(str(error)) + loss.item())
        print(str(error))


@is_eager
def joins_texts(x, loss):
    print(", ".join([f"{loss.item():.3f}", "b"]))


@is_eager
def logs_the_text_as_an_argument(x, loss):
    LOGGER.warning("%20s", f"{loss.item():.3f}")


@is_eager
def writes_to_a_text_of_its_own(x, loss):
    out = io.StringIO()
    print(f"loss {loss.item():.3f}", file=out)
    print(out.getvalue())


@is_eager
def formats_with_the_text(x, loss):
    print(f"{3.14159:{f'{abs(loss.item()):.0f}'}}")


def _stepping(function):
    def step(x):
        loss = (x * x).sum() / 7
        function(x, loss)
        return loss

    return step


def _said(step, values, *, grad):
    handler = logging.StreamHandler(stream := io.StringIO())
    LOGGER.handlers, LOGGER.propagate, LOGGER.level = [handler], False, logging.INFO
    LOGGER.manager._clear_cache()
    found = []
    for value in values:
        x = torch.full((3,), value, requires_grad=grad)
        with contextlib.redirect_stdout(stream):
            loss = step(x)
        found.append((loss.item(), torch.autograd.grad(loss, x)[0].tolist() if grad else None))
    return found, stream.getvalue()


VALUES = (0.5, 1.5, -2.5, 4.25)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", COMPILED)
def test_a_step_that_says_the_text_of_its_loss_compiles(name, grad):
    step = _stepping(COMPILED[name])
    compiled = compiled_alike(step, lambda f: _said(f, VALUES, grad=grad))
    assert _said(step, VALUES, grad=grad)[1] or name == "logs_below_the_level"
    assert len(compiled.foregrad.compilations) <= 2


@pytest.mark.parametrize("name", EAGER)
def test_text_that_is_looked_at_is_eagers(name):
    compiled_alike(_stepping(EAGER[name]), lambda f: _said(f, VALUES, grad=False), on_unsupported="eager")


def test_a_wrong_specification_raises_as_in_eager():
    compiled = foregrad.compile(_stepping(lambda x, loss: print(f"{loss.item():.3q}")), backend="eager")
    for value in VALUES:
        with pytest.raises(ValueError, match=r"Invalid format specifier|Unknown format code"):
            compiled(torch.full((3,), value))


def test_a_training_loop_prints_what_eager_prints(capsys):
    torch.manual_seed(0)
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    texts = []
    for compile in (lambda f: f, lambda f: foregrad.compile(f, backend="eager", on_unsupported="raise")):
        torch.manual_seed(1)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        @compile
        def step(x, y, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            print(f"loss {loss.item():.6f} {loss}", loss)

        for _ in range(4):
            step(x, y)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert "MseLossBackward0" in texts[0]


def test_the_history_in_the_text_of_an_argument_is_not_told():
    """What an argument was computed by is no part of the call."""

    def step(x):
        print(x)
        return x * 2

    compiled = foregrad.compile(step, backend="eager")
    leaf = torch.ones((), requires_grad=True)
    texts = []
    for f in (step, compiled):
        with contextlib.redirect_stdout(io.StringIO()) as out, warnings.catch_warnings():
            warnings.simplefilter("ignore", ForegradWarning)
            f(leaf.exp()), f(leaf * 2), f(leaf), f(leaf.detach())
        texts.append(out.getvalue())
    assert texts[0] == texts[1]


def test_a_graph_with_a_number_that_is_printed_can_be_shown(caplog):
    compiled = foregrad.compile(_stepping(COMPILED["prints_an_f_string"]), backend="eager")
    with caplog.at_level(logging.INFO, "foregrad"):
        for value in VALUES:
            compiled(torch.full((3,), value))
    assert "local_scalar_dense" in caplog.text
