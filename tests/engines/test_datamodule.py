from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, VectorEnv

from puffer_lightning.engines import PPO, RolloutDataModule
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
