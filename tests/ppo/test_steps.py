import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, RMSprop
from torch.testing import assert_close

from puffer_lightning.ppo.steps import step_if_finite, step_unless

BAD = [math.nan, math.inf, -math.inf]


class OnDevice:
    """Steps as on a GPU, where whether to skip is not read."""

    @staticmethod
    def step(optimizer: Any, norm: Tensor) -> None:
        step_unless(~norm.isfinite(), optimizer)


class OnHost:
    step = staticmethod(step_if_finite)


FUSED = [lambda p: Adam(p, lr=0.1, fused=True), lambda p: AdamW(p, lr=0.1, fused=True)]
ANY = [
    *FUSED,
    lambda p: Adam(p, lr=0.1),
    lambda p: SGD(p, lr=0.1, momentum=0.9),
    lambda p: RMSprop(p, lr=0.1),
]
WAYS = [(OnHost, make) for make in ANY] + [(OnDevice, make) for make in FUSED]


def trained(way: Any, make: Any, gradients: list[float]) -> tuple[nn.Linear, dict[str, Any]]:
    """A layer after a step with each of these gradients, and its optimizer's state."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    optimizer = make(layer.parameters())
    for gradient in gradients:
        for parameter in layer.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        # In one place alone, as from one transition.
        layer.weight.grad[0, 1] = gradient  # type: ignore[index]
        way.step(
            optimizer, nn.utils.get_total_norm([p.grad for p in layer.parameters() if p.grad is not None])
        )
    return layer, copy.deepcopy(optimizer.state_dict()["state"])


@pytest.mark.parametrize(("way", "make"), WAYS)
@pytest.mark.parametrize("bad", BAD)
def test_a_step_with_bad_gradients_leaves_nothing_behind(way: Any, make: Any, bad: float) -> None:
    layer, state = trained(way, make, [0.1, bad, bad, 0.3])
    other, other_state = trained(way, make, [0.1, 0.3])
    assert torch.equal(layer.weight, other.weight)
    assert torch.equal(layer.bias, other.bias)
    assert_close(state, other_state, rtol=0, atol=0)


@pytest.mark.parametrize("make", FUSED)
def test_both_ways_take_the_same_steps(make: Any) -> None:
    on_host, on_device = (trained(way, make, [0.1, math.nan, 0.3])[0] for way in (OnHost, OnDevice))
    assert torch.equal(on_host.weight, on_device.weight)


@pytest.mark.parametrize(("way", "make"), WAYS)
def test_a_bad_first_step_takes_none(way: Any, make: Any) -> None:
    assert torch.equal(trained(way, make, [math.nan])[0].weight, trained(way, make, [])[0].weight)


def test_later_steps_of_the_optimizer_itself_skip_nothing() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = Adam([parameter], lr=0.1, fused=True)
    parameter.grad = torch.ones(1)
    step_unless(torch.tensor(True), optimizer)
    assert parameter.item() == 0
    optimizer.step()
    assert parameter.item() != 0
