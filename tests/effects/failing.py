"""Functions of one tensor that eager refuses some values of: a table of name -> (function, good value, bad value)."""

import torch
import torch.nn.functional as F

PROGRAMS = {}
_good = torch.eye(3) * 2 + 0.1
_singular, _negative = torch.zeros(3, 3), -torch.eye(3)
_nan = torch.full((3, 3), float("nan"))
_ones, _minus = torch.ones(3), -torch.ones(3)
_classes, _high, _low = torch.tensor([0, 1]), torch.tensor([0, 5]), torch.tensor([0, -9])


def add(name, function, good, *bad):
    for number, value in enumerate(bad):
        PROGRAMS[f"{name}_{number}" if len(bad) > 1 else name] = function, good, value


for _name in "cholesky inv lu_factor pinv qr svd svdvals eigh eigvalsh slogdet".split():
    add(_name, getattr(torch.linalg, _name), _good, _singular, _negative)
add("ldl_factor", lambda x: torch.linalg.ldl_factor(x.detach()), _good, _singular)
add("cholesky_nan", torch.linalg.cholesky, _good, _nan)
add("solve", lambda x: torch.linalg.solve(x, torch.ones(3)), _good, _singular)
add("solve_ex", lambda x: torch.linalg.solve_ex(x, torch.ones(3), check_errors=True)[0], _good, _singular)
add("inv_ex", lambda x: torch.linalg.inv_ex(x, check_errors=True)[0], _good, _singular)
add("cholesky_ex", lambda x: torch.linalg.cholesky_ex(x, check_errors=True)[0], _good, _singular)
add("lu_factor_ex", lambda x: torch.linalg.lu_factor_ex(x, check_errors=True)[0], _good, _singular)
add("tensorinv", lambda x: torch.linalg.tensorinv(x, ind=1), _good, _singular)
add("tensorsolve", lambda x: torch.linalg.tensorsolve(x, torch.ones(3)), _good, _singular)
add("matrix_power", lambda x: torch.linalg.matrix_power(x, -2), _good, _singular)
add("inverse", torch.inverse, _good, _singular)
add("batched_cholesky", torch.linalg.cholesky, _good.expand(2, 3, 3), torch.stack([_good, _negative]))
add("one_hot", lambda i: F.one_hot(i, 3), _classes, _high, _low)
add("one_hot_keyword", lambda i: F.one_hot(i, num_classes=3), _classes, _high, _low)
add("one_hot_open", F.one_hot, _classes, _low)
add("quantile", lambda q: torch.quantile(torch.arange(4.0), q), _ones / 2, _ones * 2)
add("quantile_method", lambda q: torch.arange(4.0).nanquantile(q=q), _ones / 2, _ones * 2)
add("istft", lambda w: torch.istft(torch.ones(5, 5, dtype=torch.cfloat), 8, 2, 8, w), torch.ones(8), torch.zeros(8))
add("assert_async", lambda x: (torch._assert_async((x > 0).all()), x * 2)[1], _ones, _minus)
add("assert_async_said", lambda x: (torch._assert_async((x > 0).all(), "negative"), x * 2)[1], _ones, _minus)
add("assert_flag", lambda x: (torch._assert_async(x), x.float() * 2)[1], torch.tensor(True), torch.tensor(False))
add("assert_method", lambda x: (torch._assert((x > 0).all(), "negative"), x * 2)[1], _ones, _minus)
add("check", lambda x: (torch._check(bool((x > 0).all()), lambda: "negative"), x * 2)[1], _ones, _minus)
add("check_all", lambda x: (torch._check_tensor_all(x > 0, lambda: "negative"), x * 2)[1], _ones, _minus)
add("bincount", torch.bincount, _classes, _low)
add("multinomial", lambda p: torch.multinomial(p, 1), _ones, _minus, torch.zeros(3))
add("bernoulli", torch.bernoulli, _ones / 2, _ones * 2)
add("normal", lambda s: torch.normal(torch.zeros(3), s), _ones, _minus)
add("entropy", lambda p: F.binary_cross_entropy(p, torch.ones(3)), _ones / 2, _ones * 2)
add("embedding", lambda i: F.embedding(i, torch.ones(3, 2)), _classes, _high, _low)
add("embedding_bag", lambda i: F.embedding_bag(i, torch.ones(3, 2), torch.tensor([0])), _classes, _high)
add("nll_loss", lambda i: F.nll_loss(torch.ones(2, 3), i), _classes, _high)
add("cross_entropy", lambda i: F.cross_entropy(torch.ones(2, 3), i), _classes, _high, _low)
add("gather", lambda i: torch.ones(3).gather(0, i), _classes, _high)
add("scatter", lambda i: torch.ones(3).scatter(0, i, 1.0), _classes, _high)
add("scatter_add", lambda i: torch.ones(3).scatter_add(0, i, torch.ones(2)), _classes, _high)
add("index", lambda i: torch.ones(3)[i], _classes, _high)
add("index_select", lambda i: torch.ones(3).index_select(0, i), _classes, _high)
add("index_put", lambda i: torch.ones(3).index_put((i,), torch.ones(2)), _classes, _high)
add("take", lambda i: torch.ones(3).take(i), _classes, _high)
add("repeat_interleave", lambda i: torch.repeat_interleave(torch.ones(2), i), _classes, _low)
add("gaussian_nll", lambda v: F.gaussian_nll_loss(torch.ones(3), torch.ones(3), v), _ones, _minus)
add("integer_division", lambda i: torch.ones(2, dtype=torch.long) // i, torch.tensor([1, 2]), torch.tensor([0, 1]))
add(
    "masked_scatter",
    lambda m: torch.ones(3).masked_scatter(m, torch.ones(1)),
    torch.tensor([True, False, False]),
    torch.tensor([True, True, False]),
)
add(
    "mvn",
    lambda c: torch.distributions.MultivariateNormal(torch.zeros(3), c, validate_args=False).log_prob(_ones),
    _good,
    _negative,
)
