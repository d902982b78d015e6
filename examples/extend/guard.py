"""A guard: a condition on each call. This one makes a graph anew when a tensor's memory is aligned differently.

`read` runs in front of each call, on the tensors behind `inputs`; `expected` is a plain value. Guards without inputs
read the process: `CallGuard("the number of threads", torch.get_num_threads, torch.get_num_threads())`.
"""

import torch

import foregrad
from foregrad.extend import Aspect, CallGuard, aspect, view


def is_aligned(tensor):
    return tensor.data_ptr() % 64 == 0


@aspect
class Alignment(Aspect):
    def guards(self, run):
        for stand_in, record in run.records.items():
            number = run.input(stand_in)
            if record.real.numel() >= 16:
                yield CallGuard(f"alignment of {record.slot}", is_aligned, is_aligned(record.real), (number,))


def main():
    f = foregrad.compile(lambda x: x * 2, backend="eager")
    memory = torch.zeros(80)
    start = -memory.data_ptr() % 64 // 4
    f(memory[start : start + 16])
    f(memory[start : start + 16])
    print(len(view(f).graphs))  # 1
    f(memory[start + 1 : start + 17])
    print(len(view(f).graphs))  # 2
    guard = next(guard for guard in view(f).graphs[0].guards if "alignment" in guard.name)
    print(guard.name, "is", guard.expected)  # alignment of args[0] is True
    f(torch.zeros(1)), f(torch.zeros(80)[1:2])  # too small to matter: one graph more
    print(len(view(f).graphs))  # 3


if __name__ == "__main__":
    main()
