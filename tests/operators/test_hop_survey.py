"""PyTorch's samples of higher-order operators are eager's through both doors, or refused by name: see `hop_survey`."""

from tests import forked


def test_every_sample_with_gradients_is_eagers_or_refused():
    done = forked.run("tests.operators.hop_survey", "--op", "^(?!program ).* grad$", seconds=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().endswith(", 0 WRONG, ERROR or CRASH")
    assert "equal" in done.stdout
