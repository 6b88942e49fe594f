from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, VectorEnv

from puffer_lightning.engines import PPO, RolloutDataModule
from puffer_lightning.envs import SharedMemoryVectorEnv
from puffer_lightning.errors import ConfigurationError
from tests.environments import Counter, counters


class Closing(Counter):
    """Counts how often any of its kind is closed."""

    closed = 0

    def close(self) -> None:
        Closing.closed += 1


def closing(num_envs: int) -> VectorEnv[Any, Any, Any]:
    return counters(AutoresetMode.SAME_STEP, kind=Closing)


def data(**options: Any) -> RolloutDataModule:
    return RolloutDataModule(**({"num_envs": 4, "horizon": 8, "eval_episodes": 3} | options))


@pytest.mark.parametrize("option", ["num_envs", "horizon", "total_timesteps", "eval_episodes"])
@pytest.mark.parametrize("size", [0, -1, 2.5, 1e3, float("nan")])
def test_refuses_sizes_that_are_no_sizes(option: str, size: float) -> None:
    with pytest.raises(ConfigurationError, match=f"{option} is {size}: set it to a whole number, 1 or more"):
        data(**{option: size})


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, float("nan")])
def test_refuses_a_share_of_the_ranks_that_would_preempt_all_or_none(share: float) -> None:
    with pytest.raises(ConfigurationError, match=f"preempt_at is {share}: set it between 0 and 1"):
        data(preempt_at=share)


def test_refuses_to_preempt_overlapped_rollouts() -> None:
    with pytest.raises(ConfigurationError, match="preempt_at does not go with overlap halves"):
        data(preempt_at=0.5, overlap="halves", num_workers=2)


def test_environments_are_those_of_each_rank_or_split() -> None:
    assert data(num_envs=8).envs_of_each(4) == 8
    assert data(num_envs=8, split_envs=True).envs_of_each(4) == 2
    with pytest.raises(
        ConfigurationError, match="num_envs 8 cannot be split among 3 ranks: set it to a mult"
    ):
        data(num_envs=8, split_envs=True).envs_of_each(3)


def test_takes_sizes_from_numpy() -> None:
    assert data(num_envs=np.int64(4)).steps_per_rollout == 32


def test_refuses_an_unknown_environment_when_made() -> None:
    with pytest.raises(ConfigurationError, match="did you mean CartPole-v1"):
        data(env="CartPol-v1")


@pytest.mark.parametrize(("steps", "iterations"), [(1, 1), (32, 1), (33, 2), (320, 10)])
def test_trains_until_the_total_is_reached(steps: int, iterations: int) -> None:
    assert data(total_timesteps=steps).num_iterations == iterations


def test_makes_environments_when_they_are_needed_and_once() -> None:
    numbers: list[int] = []

    def make(num_envs: int) -> VectorEnv[Any, Any, Any]:
        numbers.append(num_envs)
        return counters(AutoresetMode.SAME_STEP)

    module = data(env=make)
    assert not numbers
    module.setup("fit")
    module.setup("fit")
    assert numbers == [4]
    _ = module.spaces
    assert numbers == [4], "the spaces are those of environments that are there anyway"
    module.setup("validate")
    assert numbers == [4, 3], "no more environments than episodes to play"
    module.close()


def test_refuses_another_number_of_environments_than_it_asked_for() -> None:
    module = data(env=lambda num_envs: counters(AutoresetMode.SAME_STEP), num_envs=5)
    with pytest.raises(ConfigurationError, match="made 4 environments when told to make num_envs 5"):
        module.setup("fit")


@pytest.mark.parametrize("end", ["teardown", "on_exception"])
def test_closes_the_environments(end: str) -> None:
    module = data(env=closing)
    module.setup("fit")
    Closing.closed = 0
    getattr(module, end)(KeyboardInterrupt() if end == "on_exception" else "fit")
    assert Closing.closed == 4
    module.close()
    assert Closing.closed == 4, "once"


def test_collects_again_after_it_was_closed() -> None:
    torch.manual_seed(1)
    module, model = data(env=closing), PPO()
    model.build(module)
    first = module.collect(model.policy).observations.clone()
    module.close()
    assert torch.equal(module.collect(model.policy).observations, first)
    module.close()


def test_evaluates_the_same_episodes_each_time() -> None:
    torch.manual_seed(1)
    module, model = data(env="CartPole-v1", eval_episodes=5), PPO()
    model.build(module)
    first = module.evaluate(model.policy)
    module.collect(model.policy)
    second = module.evaluate(model.policy)
    assert len(set(first.lengths.tolist())) > 1
    assert first.lengths.tolist() == second.lengths.tolist()
    module.close()


WORKERS: dict[str, Any] = {"env": "Acrobot-v1", "num_workers": 2, "worker_options": {"context": "fork"}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"worker_options": {"on_fault": "raise"}},
            "worker_options are for worker processes: set num_workers",
        ),
        ({"num_workers": 2, "worker_options": {"on_falt": "raise"}}, "worker_options has no on_falt: choose"),
        ({"overlap": "thirds"}, "overlap is 'thirds': set it to halves or first_ready"),
        ({"overlap": "halves", "num_envs": 5}, "num_envs is 5 with overlap halves: set it to an even number"),
        ({"overlap": "halves", "num_workers": 1}, "num_workers is 1 with overlap halves: set it to an even"),
        ({"overlap": "first_ready", "num_envs": 6, "num_workers": 4}, "even number that divides num_envs 6"),
    ],
)
def test_refuses_workers_and_overlap_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        data(**options)


def test_refuses_to_overlap_what_steps_at_once() -> None:
    module = data(env="CartPole-v1", overlap="halves")
    with pytest.raises(ConfigurationError, match="overlap is halves, but CartPoleVectorEnv steps all"):
        module.setup("fit")


def test_a_fault_option_that_does_not_exist_is_refused_by_the_workers() -> None:
    module = data(**WORKERS | {"worker_options": {"on_fault": "ignore"}})
    with pytest.raises(ConfigurationError, match="on_fault is 'ignore': set it to one of raise, restart"):
        module.setup("fit")


@pytest.mark.parametrize("overlap", ["halves", "first_ready"])
def test_overlapped_rollouts_are_those_of_stepping_at_once(overlap: str) -> None:
    found = []
    for options in ({"num_workers": 0, "worker_options": None}, {"overlap": overlap}):
        torch.manual_seed(1)
        module, model = data(**WORKERS | options), PPO()
        model.build(module)
        found.append([module.collect(model.policy).actions.clone() for _ in range(3)])
        assert len(module.evaluate(model.policy).returns) == 3
        module.close()
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_what_makes_environments_is_told_the_size_of_a_half_for_training_alone() -> None:
    told = []

    def make(num_envs: int, batch_size: int | None = None) -> VectorEnv[Any, Any, Any]:
        told.append((num_envs, batch_size))
        return SharedMemoryVectorEnv("Acrobot-v1", num_envs, 2, context="fork", batch_size=batch_size)

    for options in ({}, {"overlap": "first_ready"}, {"overlap": "halves", "env_kwargs": {"batch_size": 4}}):
        module = data(env=make, eval_episodes=2, **options)
        module.setup("fit")
        module.close()
    module = data(env=make, eval_episodes=2, overlap="halves")
    module.setup("validate")
    module.close()
    assert told == [(4, None), (4, 2), (4, 4), (2, None)]
