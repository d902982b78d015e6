"""Programs that are given a warning of PyTorch's that comes once in a process: run as `warned_once kind name action how`."""

import sys
import warnings

import torch

import foregrad


def meshgrid(x):
    return torch.meshgrid(x.sin().reshape(1), torch.arange(3.0))[0].sum()


def transposed(x):
    return x.expand(2, 3, 4).T.sum()


def scalar(x):
    return x * float(x.clone().requires_grad_() * 2)


def caught(x):
    warned = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            WARN(x)
        except UserWarning:
            warned = 1
    return x * 2 + warned


def caught_twice(x):
    return caught(x) + 2 * caught(x)


def recorded(x):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        y = WARN(x)
    return y + len(said)


def ignored(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return WARN(x)


def told(x):
    return WARN(x) + x.cos()


def seeds(x):
    y = WARN(x)
    torch.manual_seed(0)
    return y


WARN = globals()[sys.argv[1]] if __name__ == "__main__" else meshgrid


def main():
    name, action, how = sys.argv[2:]
    program = globals()[name]
    called = program
    if how != "eager":
        dynamic = True if how == "dynamic" else None
        called = foregrad.compile(program, backend="eager", on_unsupported="eager", dynamic=dynamic)
    for call in range(4):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter(action)
            warnings.filterwarnings("ignore", category=foregrad.errors.ForegradWarning)
            try:
                print(called(torch.tensor(0.5 + call)).item())
            except UserWarning as error:
                print("raised", str(error)[:20])
            print([str(one.message)[:20] for one in said])
    with warnings.catch_warnings(record=True) as said:
        WARN(torch.ones(()))
    print("left", len(said))
    if how != "eager" and name != "seeds":
        assert len(foregrad.extend.view(called).graphs) == 1


if __name__ == "__main__":
    main()
