import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from puffer_lightning.distributed import CommHook, Compression
from tests.distributed.processes import RANKS, run_ranks

INPUTS, OUTPUTS, STEPS = 32, 32, 20
NUMBERS = INPUTS * OUTPUTS + OUTPUTS


def gradients(rank: int, comm_hook: CommHook) -> tuple[list[float], float, int, int, str]:
    """Relative errors of a layer's averaged gradients, and of their mean; the bytes before and after."""
    torch.manual_seed(0)
    layer = nn.Linear(INPUTS, OUTPUTS)
    model, exact = DistributedDataParallel(layer), nn.Linear(INPUTS, OUTPUTS)
    exact.load_state_dict(layer.state_dict())
    compression = Compression(comm_hook)
    compression.register(model)
    rows = torch.randn(RANKS, 4, INPUTS)
    differences = []
    for _ in range(STEPS):
        model.zero_grad()
        exact.zero_grad()
        torch.autograd.backward(model(rows[rank]).square().mean())
        torch.autograd.backward(exact(rows.flatten(0, 1)).square().mean())
        assert layer.weight.grad is not None
        assert exact.weight.grad is not None
        differences.append((layer.weight.grad - exact.weight.grad) / exact.weight.grad.norm())
    errors = [difference.norm().item() for difference in differences]
    error_of_mean = torch.stack(differences).mean(0).norm().item()
    return errors, error_of_mean, compression.bytes_before, compression.bytes_sent, str(compression)


@pytest.mark.parametrize(("comm_hook", "precision"), [("fp16", 2e-3), ("bf16", 2e-2)])
def test_half_precision_sends_half_the_bytes_of_nearly_the_same_gradient(
    comm_hook: CommHook, precision: float
) -> None:
    for errors, _, before, sent, said in run_ranks(gradients, comm_hook):
        assert 1e-5 < max(errors) < precision
        assert (before, sent) == (STEPS * NUMBERS * 4, STEPS * NUMBERS * 2)
        assert said.endswith("50% less.")


def test_powersgd_sends_low_rank_factors_after_ten_exact_minibatches() -> None:
    one, other = run_ranks(gradients, "powersgd")
    errors, error_of_mean, before, sent, _ = one
    assert other == one
    assert max(errors[:10]) < 1e-5
    assert min(errors[10:]) > 0.1
    assert error_of_mean < min(errors[10:]), "what one minibatch leaves out, the next ones bring"
    factors = (INPUTS + OUTPUTS) * 4 + OUTPUTS
    assert (before, sent) == (STEPS * NUMBERS * 4, 10 * NUMBERS * 4 + 10 * factors * 4)
