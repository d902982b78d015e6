"""Second calls of modules: see worlds.py."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.guards.worlds import CASES, RECOMPILE, REUSE, World, case, t

__all__ = ["CASES"]


class Config:
    def __init__(self):
        self.gain = 2
        self.unused = 1


class Net(nn.Module):
    bonus = 1

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.dropout = nn.Dropout(0.5)
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.register_buffer("shift", torch.ones(3))
        self.register_buffer("mask", None)
        self.use_bias = True
        self.num_layers = 2
        self.mode = "relu"
        self.scale = 0.5
        self.options = {"gain": 2, "steps": [1]}
        self.extra = None
        self.unread = 0
        self.config = Config()

    def forward(self, x):
        x = self.inner(x)
        if self.use_bias:
            x = x + self.shift
        for layer in self.layers[: self.num_layers]:
            x = layer(x)
        if self.extra is not None:
            x = x * self.extra
        if self.mask is not None:
            x = x * self.mask
        x = getattr(torch, self.mode)(x) * self.scale * self.options["gain"] + len(self.options["steps"])
        return self.dropout(self.norm(x)) * self.config.gain + self.bonus


def net(change, *, make=None):
    model = make() if make else Net()
    return World(model, (t(4, 3, grad=True),), (t(4, 3, grad=True),), change=lambda: change(model))


def doing(graphs, change, name):
    def make():
        return net(change)

    make.__name__ = name
    case(graphs)(make)


def set_(path, value):
    def change(model):
        *way, last = path.split(".")
        for step in way:
            model = getattr(model, step)
        setattr(model, last, value() if callable(value) else value)

    return change


def class_bonus(model):
    Net.bonus = 2
    return lambda: setattr(Net, "bonus", 1)


def tie(model):
    model.layers[0].weight = model.layers[1].weight


def replace_data(model):
    model.inner.weight.data = torch.ones(3, 3)


def strided_data(model):
    model.inner.weight.data = torch.arange(9.0).view(3, 3).t()


def write(model):
    with torch.no_grad():
        model.inner.weight.mul_(2)


def load(assign, dtype=torch.float32):
    def change(model):
        other = Net().to(dtype)
        model.load_state_dict({k: torch.full_like(v, 2) for k, v in other.state_dict().items()}, assign=assign)

    return change


def alias(model):
    model.norm.running_mean = model.shift


def forward_elsewhere(model):
    model.inner.forward = lambda x: x * 3


def global_hook(model):
    return nn.modules.module.register_module_forward_hook(
        lambda m, i, o: o * 1.5 if isinstance(m, nn.Linear) else o
    ).remove


def no_fast_path(model):
    torch.backends.mha.set_fastpath_enabled(False)
    return lambda: torch.backends.mha.set_fastpath_enabled(True)


for graphs, change, name in [
    (REUSE, lambda m: None, "a_module_again"),
    (REUSE, lambda m: m.train(), "train_in_training"),
    (RECOMPILE, lambda m: m.eval(), "eval"),
    (RECOMPILE, lambda m: m.dropout.eval(), "eval_of_one_submodule"),
    (REUSE, lambda m: m.inner.eval(), "eval_of_one_that_does_not_look"),
    (RECOMPILE, set_("use_bias", False), "a_bool_of_a_module"),
    (RECOMPILE, set_("num_layers", 1), "an_int_of_a_module"),
    (RECOMPILE, set_("scale", 0.25), "a_float_of_a_module"),
    (REUSE, set_("scale", lambda: float("0.5")), "an_equal_float_of_a_module"),
    (RECOMPILE, set_("mode", "tanh"), "a_string_of_a_module"),
    (RECOMPILE, set_("extra", 2), "none_of_a_module"),
    (RECOMPILE, set_("extra", lambda: torch.ones(3)), "none_that_becomes_a_tensor"),
    (RECOMPILE, set_("mask", lambda: torch.ones(3)), "a_buffer_that_was_none"),
    (RECOMPILE, set_("dropout.p", 0.1), "p_of_dropout"),
    (RECOMPILE, set_("norm.momentum", 0.3), "momentum_of_batch_norm"),
    (RECOMPILE, set_("norm.track_running_stats", False), "running_statistics_unused"),
    (REUSE, set_("unread", 1), "an_attribute_nobody_reads"),
    (REUSE, set_("brand_new", 1), "a_new_attribute_nobody_reads"),
    (RECOMPILE, lambda m: m.options.update(gain=3), "an_item_of_a_dict_of_a_module"),
    (RECOMPILE, lambda m: m.options["steps"].append(2), "a_list_deep_in_a_module"),
    (RECOMPILE, set_("config.gain", 3), "an_option_of_a_module_s_config"),
    (REUSE, set_("config.unheard_of", 3), "an_option_nobody_knows"),
    (RECOMPILE, set_("config", Config), "another_config"),
    (RECOMPILE, class_bonus, "an_attribute_of_a_module_s_class"),
    (RECOMPILE, set_("bonus", 3), "an_attribute_that_hides_the_module_s_class"),
    (RECOMPILE, set_("inner", lambda: nn.Linear(3, 3)), "a_submodule_replaced"),
    (RECOMPILE, lambda m: m.layers.__setitem__(1, nn.Identity()), "a_layer_replaced"),
    (REUSE, set_("inner.weight", lambda: nn.Parameter(torch.ones(3, 3))), "a_parameter_rebound"),
    (RECOMPILE, set_("inner.weight", lambda: nn.Parameter(torch.ones(3, 3, dtype=torch.float32).t().contiguous().t())), "a_parameter_of_other_strides"),
    (RECOMPILE, tie, "two_parameters_tied"),
    (RECOMPILE, set_("inner.bias", None), "a_parameter_removed"),
    (RECOMPILE, lambda m: m.inner.requires_grad_(False), "parameters_frozen"),
    (RECOMPILE, lambda m: m.inner.bias.requires_grad_(False), "one_parameter_frozen"),
    (REUSE, replace_data, "data_replaced"),
    (RECOMPILE, strided_data, "data_of_other_strides"),
    (REUSE, write, "a_parameter_written_to"),
    (REUSE, load(assign=False), "load_state_dict"),
    (REUSE, load(assign=True), "load_state_dict_by_assignment"),
    (REUSE, set_("shift", lambda: torch.zeros(3)), "a_buffer_rebound"),
    (RECOMPILE, alias, "a_buffer_that_is_another_s"),
    (RECOMPILE, forward_elsewhere, "a_forward_put_on_a_submodule"),
    (RECOMPILE, lambda m: m.inner.register_forward_hook(lambda *a: a[2] * 2), "a_forward_hook"),
    (RECOMPILE, lambda m: m.inner.register_forward_pre_hook(lambda _, args: (args[0] * 2,)), "a_forward_pre_hook"),
    (RECOMPILE, lambda m: m.inner.register_full_backward_hook(lambda m, i, o: (i[0] * 2,)), "a_backward_hook"),
    (REUSE, lambda m: m.register_forward_hook(lambda *a: a[2] * 2), "a_hook_on_the_module_itself"),
    (REUSE, lambda m: m.inner.weight.register_hook(lambda g: g * 2), "a_hook_on_a_parameter"),
    (REUSE, lambda m: m.inner.weight.register_post_accumulate_grad_hook(lambda p: [p.grad.mul_(2), None][1]), "a_post_accumulate_hook"),
    (RECOMPILE, global_hook, "a_global_forward_hook"),
    (REUSE, no_fast_path, "attention_fast_path_of_a_model_without_attention"),
]:  # fmt: skip
    doing(graphs, change, name)


@case(RECOMPILE)
def double_precision():
    model = Net()
    x = t(4, 3, dtype=torch.float64)
    return World(model, (t(4, 3),), (x,), change=model.double)


@case(RECOMPILE)
def half_precision():
    model = nn.Linear(3, 3)
    return World(model, (t(4, 3),), (t(4, 3).bfloat16(),), change=model.bfloat16)


@case(RECOMPILE)
def a_hook_removed():
    model = Net()
    handle = model.inner.register_forward_hook(lambda *a: a[2] * 2)
    return World(model, (t(4, 3),), (t(4, 3),), change=handle.remove)


@case(RECOMPILE)
def one_parameter_more_in_a_sum():
    class Sum(nn.Linear):
        def forward(self, x):
            return super().forward(x).sum() + sum(p.pow(2).sum() for p in self.parameters())

    model = Sum(3, 3)

    def change():
        model.more = nn.Parameter(torch.ones(3))

    return World(model, (t(4, 3),), (t(4, 3),), change=change)


@case(RECOMPILE)
def another_module_as_an_argument():
    return World(lambda m, x: m(x), (nn.Linear(3, 3), t(4, 3)), (nn.Linear(3, 3), t(4, 3)))


@case(REUSE)
def a_copy_has_graphs_of_its_own():
    return World(Net(), (t(4, 3),), (t(4, 3),), rebuild=copy.deepcopy)


@case(RECOMPILE)
def a_global_module_replaced():
    box = {"model": nn.Linear(3, 3)}

    def change():
        box["model"] = nn.Linear(3, 3)

    return World(lambda x: box["model"](x), (t(4, 3),), (t(4, 3),), change=change)


@case(RECOMPILE)
def a_module_in_a_list_replaced():
    layers = [nn.Linear(3, 3)]

    def change():
        layers[0] = nn.Linear(3, 3)

    return World(lambda x: layers[0](x), (t(4, 3),), (t(4, 3),), change=change)
