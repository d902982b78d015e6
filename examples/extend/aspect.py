"""An aspect: a subject of captures. This one refuses float64 by name, with the line and the remedy.

`functions` has the torch functions that the class owns: a method runs in place of each while a function is captured.
`recorder.host` is the capture; `where()` is the user's line. A refusal is an `Unsupported...Error`: the call then
runs eagerly with one warning, or raises, as `on_unsupported` says.
"""

import torch

import foregrad
from foregrad.errors import UnsupportedOpError
from foregrad.extend import Aspect, aspect


@aspect
class NoDoublePrecision(Aspect):
    def __init__(self, host, recorder):
        self.recorder = recorder

    def widen(self, function, args, kwargs):
        where = self.recorder.host.where()
        raise UnsupportedOpError(f"`{function.__name__}()` at {where} makes float64: use `.float()`")

    functions = {torch.Tensor.double: widen}  # noqa: RUF012

    def finished(self, run):
        """The graph is built: the last moment to refuse."""
        for info in run.joint.signature.inputs:
            if info.spec.dtype is torch.float64:
                raise UnsupportedOpError(f"`{run.joint.name}` is given float64 in {info.slot}: pass float32")


def mean(x):
    return x.double().mean()


def main():
    compiled = foregrad.compile(mean, backend="eager", on_unsupported="raise")
    try:
        compiled(torch.ones(3))
    except UnsupportedOpError as error:
        print(str(error).splitlines()[0])  # `double()` at ...mean: ... makes float64: use `.float()`
    total = foregrad.compile(torch.sum, backend="eager", on_unsupported="raise")
    print(total(torch.ones(3)))  # tensor(3.)
    try:
        total(torch.ones(3, dtype=torch.float64))
    except UnsupportedOpError as error:
        print(str(error).splitlines()[0])  # `sum` is given float64 in args[0]: pass float32


if __name__ == "__main__":
    main()
