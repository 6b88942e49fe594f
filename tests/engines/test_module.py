from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from lightning.pytorch.loggers import CSVLogger
from torch.optim import LBFGS, SGD, Adam, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from puffer_lightning.callbacks import Checkpoint
from puffer_lightning.engines import PPO, RolloutDataModule
from puffer_lightning.errors import ConfigurationError
from tests.callbacks.runs import STEPS_PER_ITERATION, Break, data, trainer

sgd = partial(SGD, lr=0.5)


def learning_rates(folder: Path) -> dict[int, float]:
    lines = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
    rate, step = lines[0].index("train/learning_rate"), lines[0].index("step")
    return {int(line[step]): float(line[rate]) for line in lines[1:] if line[rate]}


def fit(
    folder: Path, model: PPO, iterations: int = 4, max_epochs: int = -1, ckpt_path: Path | None = None
) -> dict[int, float]:
    """Learning rates of a run by environment steps."""
    logger = CSVLogger(folder, name="", version="")
    checkpoint = Checkpoint(dirpath=str(folder))
    run = trainer(checkpoint, folder=folder, logger=logger, max_epochs=max_epochs, log_every_n_steps=1)
    run.fit(model, datamodule=data(iterations), ckpt_path=ckpt_path)
    return learning_rates(folder)


class TestLearningRate:
    """By environment steps done before the iteration, as shares of the total."""

    @pytest.mark.parametrize(
        ("schedule", "warm_up_share", "multipliers"),
        [
            ("constant", 0.0, [1.0, 1.0, 1.0, 1.0]),
            ("linear", 0.0, [1.0, 0.75, 0.5, 0.25]),
            ("cosine", 0.0, [1.0, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2]),
            ("constant", 0.5, [0.1, 0.55, 1.0, 1.0]),
            ("linear", 0.5, [0.1, 0.55 * 0.75, 0.5, 0.25]),
        ],
    )
    def test_follows_the_schedule(
        self, schedule: Any, warm_up_share: float, multipliers: list[float], tmp_path: Path
    ) -> None:
        rates = fit(tmp_path, PPO(optimizer=sgd, lr_schedule=schedule, warm_up_share=warm_up_share))
        assert list(rates) == [STEPS_PER_ITERATION * i for i in (1, 2, 3, 4)]
        assert list(rates.values()) == pytest.approx([0.5 * m for m in multipliers])

    def test_a_torch_scheduler_steps_once_an_iteration(self, tmp_path: Path) -> None:
        model = PPO(optimizer=sgd, lr_schedule=partial(StepLR, step_size=2, gamma=0.1))
        assert list(fit(tmp_path, model).values()) == pytest.approx([0.5, 0.5, 0.05, 0.05])

    def test_goes_on_when_resumed(self, tmp_path: Path) -> None:
        fit(tmp_path / "a", PPO(optimizer=sgd), max_epochs=2)
        rates = fit(tmp_path / "b", PPO(optimizer=sgd), ckpt_path=tmp_path / "a" / "last.ckpt")
        assert rates == pytest.approx({3 * STEPS_PER_ITERATION: 0.25, 4 * STEPS_PER_ITERATION: 0.125})

    def test_the_options_given_now_win_over_the_checkpoint(self, tmp_path: Path) -> None:
        fit(tmp_path / "a", PPO(optimizer=sgd), max_epochs=2)
        model = PPO(optimizer=partial(SGD, lr=0.1, momentum=0.9), lr_schedule="linear")
        rates = fit(tmp_path / "b", model, iterations=8, ckpt_path=tmp_path / "a" / "last.ckpt")
        assert list(rates) == [STEPS_PER_ITERATION * i for i in range(3, 9)]
        assert list(rates.values()) == pytest.approx([0.1 * (1 - i / 8) for i in range(2, 8)])
        [state] = torch.load(tmp_path / "b" / "last.ckpt")["optimizer_states"]
        assert state["param_groups"][0]["momentum"] == 0.9

    def test_a_torch_scheduler_is_resumed_as_it_was(self, tmp_path: Path) -> None:
        step = partial(StepLR, step_size=1, gamma=0.1)
        fit(tmp_path / "a", PPO(optimizer=sgd, lr_schedule=step), max_epochs=2)
        model = PPO(optimizer=sgd, lr_schedule=step)
        rates = fit(tmp_path / "b", model, ckpt_path=tmp_path / "a" / "last.ckpt")
        assert list(rates.values()) == pytest.approx([5e-3, 5e-4])


class TestIterations:
    def test_as_many_as_reach_the_total(self, tmp_path: Path) -> None:
        model, run = PPO(), trainer(folder=tmp_path)
        run.fit(model, datamodule=data(3))
        assert run.current_epoch == 3
        assert model.env_steps == 3 * STEPS_PER_ITERATION
        assert run.max_epochs == -1, "left as the user set it"

    def test_max_epochs_stops_before_and_says_so(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = PPO()
        with caplog.at_level("INFO"):
            trainer(folder=tmp_path, max_epochs=3).fit(model, datamodule=data(5))
        assert model.env_steps == 3 * STEPS_PER_ITERATION
        assert "trainer.max_epochs ends the run after 3 iterations: 384 of 640" in caplog.text

    def test_max_epochs_beyond_the_total_does_not_prolong_the_run(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = PPO()
        with caplog.at_level("INFO"):
            trainer(folder=tmp_path, max_epochs=7).fit(model, datamodule=data(2))
        assert model.env_steps == 2 * STEPS_PER_ITERATION
        assert "ends the run after" not in caplog.text

    def test_max_time_stops(self, tmp_path: Path) -> None:
        model = PPO()
        trainer(folder=tmp_path, max_time={"seconds": 1}).fit(model, datamodule=data(10**6))
        assert 0 < model.env_steps < 10**6 * STEPS_PER_ITERATION

    def test_a_trial_run_is_one_iteration(self, tmp_path: Path) -> None:
        model = PPO()
        trainer(folder=tmp_path, fast_dev_run=True).fit(model, datamodule=data(5))
        assert model.env_steps == STEPS_PER_ITERATION

    def test_of_the_same_trainer_stop_where_they_stopped(self, tmp_path: Path) -> None:
        model, rollouts, run = PPO(), data(2), trainer(folder=tmp_path)
        run.fit(model, datamodule=rollouts)
        weights = [parameter.clone() for parameter in model.parameters()]
        run.fit(model, datamodule=rollouts)
        assert model.env_steps == 2 * STEPS_PER_ITERATION
        assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))

    def test_of_the_same_trainer_go_on_if_there_is_more_to_do(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        model, rollouts, run = PPO(), data(2), trainer(folder=tmp_path)
        run.fit(model, datamodule=rollouts)
        rollouts.total_timesteps *= 2
        with caplog.at_level("INFO"):
            run.fit(model, datamodule=rollouts)
        assert run.current_epoch == 4
        assert model.env_steps == 4 * STEPS_PER_ITERATION
        assert "ends the run after" not in caplog.text

    def test_of_a_new_trainer_start_from_the_trained_policy(self, tmp_path: Path) -> None:
        model, rollouts = PPO(optimizer=partial(Adam, lr=1e-9)), data(2)
        trainer(folder=tmp_path).fit(model, datamodule=rollouts)
        before = [parameter.clone() for parameter in model.parameters()]
        trainer(folder=tmp_path).fit(model, datamodule=rollouts)
        assert model.env_steps == 2 * STEPS_PER_ITERATION
        for old, new in zip(before, model.parameters(), strict=True):
            torch.testing.assert_close(old, new, rtol=0, atol=1e-6)


class TestEnvSteps:
    """Of the policy that the model has."""

    def test_continue_from_a_checkpoint(self, tmp_path: Path) -> None:
        fit(tmp_path, PPO(), max_epochs=2)
        model = PPO()
        trainer(folder=tmp_path).fit(model, datamodule=data(3), ckpt_path=tmp_path / "last.ckpt")
        assert model.env_steps == 3 * STEPS_PER_ITERATION

    def test_are_those_of_the_loaded_policy(self, tmp_path: Path) -> None:
        fit(tmp_path, PPO(), max_epochs=2)
        model, rollouts = PPO(), data(4)
        run = trainer(folder=tmp_path)
        run.fit(model, datamodule=rollouts)
        run.test(model, datamodule=rollouts, ckpt_path=tmp_path / "last.ckpt", verbose=False)
        assert model.env_steps == 2 * STEPS_PER_ITERATION

    def test_start_at_0_after_a_mere_evaluation(self, tmp_path: Path) -> None:
        fit(tmp_path, PPO(), max_epochs=2)
        model, rollouts = PPO(), data(1)
        run = trainer(folder=tmp_path)
        run.test(model, datamodule=rollouts, ckpt_path=tmp_path / "last.ckpt", verbose=False)
        run.fit(model, datamodule=rollouts)
        assert model.env_steps == STEPS_PER_ITERATION


def test_a_policy_that_is_not_trained_can_be_evaluated(tmp_path: Path) -> None:
    [score] = trainer(folder=tmp_path, limit_val_batches=1.0).validate(
        PPO(), datamodule=data(eval_episodes=20), verbose=False
    )
    assert set(score) == {
        "val/episode_return",
        "val/episode_return_std",
        "val/episode_length",
        "val/episode_length_std",
    }
    assert 8 <= score["val/episode_return"] < 150
    assert score["val/episode_return"] == score["val/episode_length"]


def test_validates_while_it_trains(tmp_path: Path) -> None:
    run = trainer(folder=tmp_path, validate_every=1)
    run.fit(PPO(), datamodule=data(2))
    assert run.callback_metrics["val/episode_return"] >= 8


@pytest.mark.parametrize("exception", [KeyboardInterrupt(), RuntimeError("broken")])
def test_environments_are_closed_when_training_breaks(exception: BaseException, tmp_path: Path) -> None:
    rollouts = data(3)
    with pytest.raises((SystemExit, RuntimeError)):
        trainer(Break(1, exception), folder=tmp_path).fit(PPO(), datamodule=rollouts)
    assert not rollouts._envs


class OfSpaces(gym.Env[Any, Any]):
    def __init__(self, observations: spaces.Space[Any], actions: spaces.Space[Any]) -> None:
        self.observation_space, self.action_space = observations, actions


class TestRefuses:
    """What cannot work, before it trains, in words that name the option; no command line needed."""

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"warm_up_share": 1.0}, "warm_up_share is 1.0"),
            (
                {"lr_schedule": "linaer"},
                "lr_schedule is linaer: set it to constant, linear, cosine or a torch",
            ),
            ({"lr_schedule": StepLR, "warm_up_share": 0.1}, "warm_up_share 0.1 does not go with"),
            ({"gamma": float("nan")}, "gamma is nan"),
            ({"lr_scaling": "cubic"}, "lr_scaling is cubic: set it to none, linear, sqrt"),
            ({"sync_check_every": -1}, "sync_check_every is -1: set it to 0 or more"),
        ],
    )
    def test_options(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            PPO(**options)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"optimizer": partial(Adam, lr=-1.0)}, "optimizer cannot be made.*Invalid learning rate: -1.0"),
            ({"optimizer": LBFGS}, "optimizer LBFGS needs a closure"),
            ({"optimizer": sgd, "lr_schedule": StepLR}, "lr_schedule cannot be made.*step_size"),
            ({"optimizer": sgd, "lr_schedule": ReduceLROnPlateau}, "ReduceLROnPlateau needs a metric"),
            ({"num_minibatches": 7}, "num_minibatches 7 does not divide.*set it to 8"),
        ],
    )
    def test_what_shows_once_there_is_a_policy(
        self, options: dict[str, Any], message: str, tmp_path: Path
    ) -> None:
        with pytest.raises(ConfigurationError, match=message):
            trainer(folder=tmp_path).fit(PPO(**options), datamodule=data())

    @pytest.mark.parametrize(
        ("option", "instead"),
        [
            ({"gradient_clip_val": 0.5}, "model.max_grad_norm 0.5"),
            ({"accumulate_grad_batches": 2}, "model.accumulate_grad_batches 2"),
        ],
    )
    def test_trainer_options_that_are_ours(
        self, option: dict[str, Any], instead: str, tmp_path: Path
    ) -> None:
        with pytest.raises(
            ConfigurationError, match=f"instead of trainer.{next(iter(option))} set {instead}"
        ):
            trainer(folder=tmp_path, **option).fit(PPO(), datamodule=data())

    @pytest.mark.parametrize("method", ["fit", "validate", "test", "predict"])
    def test_other_data(self, method: str, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=r"datamodule=RolloutDataModule\(...\)"):
            getattr(trainer(folder=tmp_path), method)(PPO(), [0])

    @pytest.mark.parametrize(
        ("observations", "actions", "name"),
        [
            (spaces.Text(5), spaces.Discrete(2), "Text observation"),
            (spaces.Graph(spaces.Box(0, 1), None), spaces.Discrete(2), "Graph observation"),
            (spaces.Sequence(spaces.Box(0, 1)), spaces.Discrete(2), "Sequence observation"),
            (spaces.Box(0, 1), spaces.Text(5), "Text action"),
        ],
    )
    def test_spaces(
        self, observations: spaces.Space[Any], actions: spaces.Space[Any], name: str, tmp_path: Path
    ) -> None:
        def make(num_envs: int) -> VectorEnv[Any, Any, Any]:
            return SyncVectorEnv(
                [lambda: OfSpaces(observations, actions)] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP
            )

        with pytest.raises(ConfigurationError, match=f"{name} spaces are not supported: wrap"):
            trainer(folder=tmp_path).fit(PPO(), datamodule=data(env=make))

    def test_the_checkpoint_of_another_policy(self, tmp_path: Path) -> None:
        fit(tmp_path, PPO(), max_epochs=1)
        with pytest.raises(ConfigurationError, match=r"ckpt_path holds another policy: .*data\.env"):
            trainer(folder=tmp_path).fit(
                PPO(), datamodule=data(env="Acrobot-v1"), ckpt_path=tmp_path / "last.ckpt"
            )

    def test_a_checkpoint_of_something_else(self, tmp_path: Path) -> None:
        fit(tmp_path, PPO(), max_epochs=1)
        checkpoint = torch.load(tmp_path / "last.ckpt")
        torch.save({key: checkpoint[key] for key in checkpoint if key != "ppo"}, tmp_path / "other.ckpt")
        with pytest.raises(ConfigurationError, match="PPO did not write"):
            trainer(folder=tmp_path).test(PPO(), datamodule=data(), ckpt_path=tmp_path / "other.ckpt")


def test_any_torch_optimizer_trains(tmp_path: Path) -> None:
    def make(parameters: Any) -> Optimizer:
        return torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.5)

    model, rollouts = PPO(optimizer=make), RolloutDataModule(num_envs=4, horizon=32, total_timesteps=128)
    trainer(folder=tmp_path).fit(model, datamodule=rollouts)
    assert model.env_steps == 128
