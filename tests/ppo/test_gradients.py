"""What two ranks make of it is in tests/engines/test_out_of_memory.py."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch.testing import assert_close

from puffer_lightning.distributed import Sharding
from puffer_lightning.errors import ConfigurationError
from puffer_lightning.ppo import PPOConfig, minibatch_loss, update
from puffer_lightning.ppo.gradients import num_parts
from tests.transitions import ExactPolicy, parameters_of, random_rollout


def learned(
    rows: int, policy: ExactPolicy | None = None, **coefficients: Any
) -> tuple[Any, dict[str, float], PPOConfig]:
    """Parameters after an update whose memory suffices for so many transitions at a time."""

    def loss(policy: Any, batch: Any, *rest: Any) -> Any:
        if batch.size > rows:
            raise torch.OutOfMemoryError("CUDA out of memory, or so it seems.")
        return minibatch_loss(policy, batch, *rest)

    policy, config = policy or ExactPolicy(), PPOConfig(num_minibatches=2, **coefficients)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(0)
    metrics = update(policy, optimizer, random_rollout(policy), config, generator, loss_function=loss)
    return parameters_of(policy), {name: value.item() for name, value in metrics.items()}, config


@pytest.mark.parametrize(("rows", "parts"), [(32, 1), (31, 2), (16, 2), (10, 4), (1, 32)])
def test_microbatches_are_halved_until_they_fit(rows: int, parts: int) -> None:
    whole, metrics, _ = learned(32)
    weights, others, config = learned(rows)
    assert config.accumulate_grad_batches == parts
    assert_close(weights, whole, rtol=0, atol=1e-12)
    assert others == pytest.approx(metrics, rel=1e-5)


def test_also_where_there_are_as_many_as_a_division_leaves() -> None:
    # 3 microbatches of 11, 11 and 10 transitions, then 6 of at most 6.
    weights, _, config = learned(10, accumulate_grad_batches=3)
    assert config.accumulate_grad_batches == 6
    assert_close(weights, learned(32)[0], rtol=0, atol=1e-12)


def test_a_policy_that_is_divided_among_ranks_is_told_what_to_set() -> None:
    policy = ExactPolicy()
    policy.sharding = Sharding()
    with pytest.raises(ConfigurationError, match=r"Out of memory .*set accumulate_grad_batches to 2"):
        learned(16, policy)


def test_on_a_lone_cpu_microbatches_are_small_enough_for_its_caches() -> None:
    config, rows = PPOConfig(accumulate_grad_batches=2), torch.arange(4 * 4096 + 4)
    assert num_parts(rows[:100], config) == 2
    assert num_parts(rows, config) == 5
    assert num_parts(rows.to("meta"), config) == 2
    with mock.patch("puffer_lightning.ppo.gradients.world_size", return_value=2):
        assert num_parts(rows, config) == 2, "gradients may be sent while others are computed"
