import dataclasses

import torch

from puffer_lightning.rollout import Batch, Rollout, flatten, make_batch, shuffled_indices


def make_rollout(horizon: int = 3, num_envs: int = 2) -> Rollout:
    steps = (horizon, num_envs)
    number = torch.arange(horizon * num_envs).view(steps)
    return Rollout(
        observations={"image": number.view(*steps, 1).to(torch.uint8), "speed": number.view(*steps, 1) / 2},
        actions=number * 10,
        log_probs=-number.float(),
        values=number.float() + 0.5,
        next_values=number.float() + 1.5,
        rewards=number.float(),
        terminated=number == 1,
        truncated=number == 2,
        valid=number != 3,
        started=number == 2,
    )


def test_flatten_puts_time_before_environments() -> None:
    advantages = torch.arange(6).view(3, 2) * 100.0
    batch = flatten(make_rollout(), advantages)
    assert batch.actions.tolist() == [0, 10, 20, 30, 40, 50]
    assert batch.observations["image"].squeeze(-1).tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.observations["image"].dtype == torch.uint8
    assert batch.valid.tolist() == [True, True, True, False, True, True]
    assert batch.advantages.tolist() == [0.0, 100.0, 200.0, 300.0, 400.0, 500.0]


def test_returns_are_advantages_plus_the_values_of_the_rollout() -> None:
    batch = flatten(make_rollout(), torch.full((3, 2), 7.0))
    assert batch.returns.tolist() == [7.5, 8.5, 9.5, 10.5, 11.5, 12.5]


def test_flatten_copies_no_observation() -> None:
    rollout = make_rollout()
    batch = flatten(rollout, torch.zeros(3, 2))
    rollout.observations["speed"][2, 1] = 99.0
    assert batch.observations["speed"][5].item() == 99.0


def test_take_selects_the_same_rows_of_everything() -> None:
    batch = flatten(make_rollout(), torch.zeros(3, 2)).take(torch.tensor([4, 0]))
    assert isinstance(batch, Batch)
    assert batch.actions.tolist() == [40, 0]
    assert batch.observations["speed"].squeeze(-1).tolist() == [2.0, 0.0]
    assert batch.log_probs.tolist() == [-4.0, -0.0]
    assert batch.returns.tolist() == [4.5, 0.5]


def test_the_rollout_of_a_policy_without_memory_is_a_batch_of_transitions() -> None:
    batch = make_batch(make_rollout(), torch.zeros(3, 2))
    assert batch.size == 6
    assert batch.actions.tolist() == [0, 10, 20, 30, 40, 50]
    assert batch.started is None


def test_the_rollout_of_a_policy_with_memory_is_a_batch_of_whole_sequences() -> None:
    memory = {"last": torch.tensor([[7.0], [8.0]])}
    batch = make_batch(dataclasses.replace(make_rollout(), state=memory), torch.full((3, 2), 7.0))
    assert batch.size == 2
    taken = batch.take(torch.tensor([1]))
    assert taken.size == 1
    assert taken.actions.tolist() == [[10], [30], [50]]
    assert taken.observations["speed"].squeeze(-1).tolist() == [[0.5], [1.5], [2.5]]
    assert taken.returns.tolist() == [[8.5], [10.5], [12.5]]
    assert taken.valid.tolist() == [[True], [False], [True]]
    assert taken.state["last"].tolist() == [[8.0]]
    assert batch.started is not None
    assert batch.started.tolist() == [[False, False], [True, False], [False, False]]
    assert taken.started is not None
    assert taken.started.tolist() == [[False], [False], [False]]


def test_each_epoch_visits_every_transition_once_in_an_order_of_its_own() -> None:
    order = shuffled_indices(64, 3, torch.Generator().manual_seed(0))
    assert order.shape == (3, 64)
    for epoch in order:
        assert epoch.sort().values.tolist() == list(range(64))
    assert len({tuple(epoch.tolist()) for epoch in order}) == 3


def test_the_order_follows_the_generator_alone() -> None:
    torch.manual_seed(0)
    one = shuffled_indices(64, 2, torch.Generator().manual_seed(5))
    torch.manual_seed(1)
    assert torch.equal(one, shuffled_indices(64, 2, torch.Generator().manual_seed(5)))
    assert not torch.equal(one, shuffled_indices(64, 2, torch.Generator().manual_seed(6)))


def test_a_rollout_knows_its_sizes_and_counts_reset_steps() -> None:
    rollout = make_rollout(3, 2)
    assert (rollout.horizon, rollout.num_envs, rollout.num_steps) == (3, 2, 6)


def test_to_moves_every_tensor_and_costs_nothing_where_it_is() -> None:
    rollout = make_rollout()
    assert rollout.to("cpu") is rollout
    moved = rollout.to("meta")
    assert moved.seconds == rollout.seconds
    assert {leaf.device.type for leaf in moved.observations.values()} == {"meta"}
    for field in dataclasses.fields(Rollout):
        tensor = getattr(moved, field.name)
        assert not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta", field.name
    assert rollout.rewards.device.type == "cpu", "the original stays"
