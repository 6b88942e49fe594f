import functools
import re
from pathlib import Path

import gymnasium as gym
import pytest
from gymnasium.vector import VectorEnv

from puffer_lightning.callbacks import EvaluationReport, Progress
from puffer_lightning.envs.pettingzoo import make_pettingzoo_env
from puffer_lightning.errors import ConfigurationError
from tests.callbacks.runs import PPO, Other, data, trainer
from tests.environments import Place, reward
from tests.envs.parallel_environments import Crew


def reports(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("evaluation after")]


@pytest.mark.parametrize("bar", [True, False])
def test_one_line_after_each_validation_of_a_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bar: bool
) -> None:
    callbacks = [EvaluationReport(), Progress()] if bar else [EvaluationReport()]
    run = trainer(
        *callbacks, folder=tmp_path, validate_every=2, num_sanity_val_steps=1, enable_progress_bar=bar
    )
    run.fit(PPO(), datamodule=data(4, eval_episodes=3))
    printed = reports(capsys.readouterr().out)
    assert [line[: line.index(",")] for line in printed] == [
        "evaluation after 256 steps: 3 greedy episodes of CartPole-v1",
        "evaluation after 512 steps: 3 greedy episodes of CartPole-v1",
    ]


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_the_numbers_are_those_of_the_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stage: str
) -> None:
    run = trainer(EvaluationReport(), folder=tmp_path, limit_val_batches=1.0)
    getattr(run, stage)(PPO(), datamodule=data(eval_episodes=20, eval_greedy=False), verbose=False)
    key = {"validate": "val", "test": "test"}[stage]
    metrics = {name: value.item() for name, value in run.callback_metrics.items()}
    assert metrics[f"{key}/episode_return_std"] > 0
    assert reports(capsys.readouterr().out) == [
        "evaluation after 0 steps: 20 sampled episodes of CartPole-v1, "
        f"return {metrics[f'{key}/episode_return']:.2f} ± {metrics[f'{key}/episode_return_std']:.2f}, "
        f"length {metrics[f'{key}/episode_length']:.1f} ± {metrics[f'{key}/episode_length_std']:.1f}"
    ]


def make_cart_poles(num_envs: int, length: int = 7) -> VectorEnv:
    return gym.make_vec("CartPole-v1", num_envs, "sync", max_episode_steps=length)


@pytest.mark.parametrize("env", [make_cart_poles, functools.partial(make_cart_poles, length=5)])
def test_factories_have_names_and_one_episode_no_plural(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], env: object
) -> None:
    run = trainer(EvaluationReport(), folder=tmp_path)
    run.test(PPO(), datamodule=data(env=env, eval_episodes=1), verbose=False)
    (line,) = reports(capsys.readouterr().out)
    assert "1 greedy episode of make_cart_poles, return" in line
    assert re.search(r"return [57]\.00 ± 0\.00, length [57]\.0 ± 0\.0$", line)


def crew(num_envs: int) -> VectorEnv:
    return make_pettingzoo_env(num_envs, Crew)


@pytest.mark.parametrize("num_episodes", [1, 5])
def test_types_of_agents_have_their_own_means(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_episodes: int
) -> None:
    run = trainer(EvaluationReport(), folder=tmp_path)
    run.test(PPO(), datamodule=data(env=crew, eval_episodes=num_episodes), verbose=False)
    lived = [Crew.lives[agent].length for agent in Crew.possible_agents * 2][:num_episodes]
    # Both environments call their agents 0, 1 and 2.
    returns = [
        sum(reward(Place(index % 3, 0, step)) for step in range(length)) for index, length in enumerate(lived)
    ]
    walkers, sitters = [returns[index] for index in (0, 1, 3, 4) if index < num_episodes], returns[2:3]
    expected = {"walker": sum(walkers) / len(walkers)} | ({"sitter": sitters[0]} if sitters else {})
    prefix = "test/episode_return/"
    metrics = {name: value.item() for name, value in run.callback_metrics.items() if prefix in name}
    assert metrics == {prefix + name: pytest.approx(mean) for name, mean in expected.items()}
    (line,) = reports(capsys.readouterr().out)
    assert all(f", {name} {mean:.2f}" in line for name, mean in expected.items())


def test_other_ranks_print_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(EvaluationReport(), folder=tmp_path)
    monkeypatch.setattr(type(run), "is_global_zero", False)
    run.test(PPO(), datamodule=data(), verbose=False)
    assert not reports(capsys.readouterr().out)


def test_refuses_another_module(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"EvaluationReport works with PPO and RolloutDataModule"):
        trainer(EvaluationReport(), folder=tmp_path).validate(Other(), datamodule=data())
