"""Invariant 6: a run that is stopped and resumed is the run that never stopped, bit for bit."""

import dataclasses
import random
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal
from unittest import mock

import gymnasium as gym
import lightning as L
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import PassiveEnvChecker, TimeLimit
from lightning.fabric import Fabric
from torch.optim.lr_scheduler import StepLR

from puffer_lightning.distributed import world_size
from puffer_lightning.engines import PPO, RolloutDataModule, iterations, save_checkpoint
from puffer_lightning.engines.elastic import read_sizes
from puffer_lightning.envs import EnvSource
from puffer_lightning.errors import ConfigurationError
from puffer_lightning.policies import LSTMPolicy
from tests.distributed.processes import RANKS, run_ranks
from tests.equivalence.runs import quiet_trainer, without_time

ITERATIONS = 5
HORIZON, NUM_ENVS = 16, 8

Engine = Literal["trainer", "fabric"]
BOTH = pytest.mark.parametrize("engine", ["trainer", "fabric"])

# As ppo.yaml, and with all that has a state of its own.
OPTIONS: dict[str, Any] = {
    "update_epochs": 2,
    "num_minibatches": 4,
    "accumulate_grad_batches": 2,
    "gamma": 0.98,
    "gae_lambda": 0.8,
    "ent_coef": 0.01,
    "lr_schedule": "linear",
    "normalize_observations": True,
    "normalize_rewards": True,
}


@dataclasses.dataclass
class Outcome:
    """What a rank saw of a run; NumPy, to cross processes."""

    metrics: list[dict[str, float]]
    weights: dict[str, Any]
    optimizer: list[Any]
    draws: tuple[float, float, float]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Outcome)
        return (
            self.metrics == other.metrics
            and self.draws == other.draws
            and _same(self.weights, other.weights)
            and _same(self.optimizer, other.optimizer)
        )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(np.array_equal(one, other))


class Recorder(L.Callback):
    """Keeps the metrics of each iteration, and saves after one of them."""

    def __init__(self, stop_after: int | None, path: str) -> None:
        self.metrics: list[dict[str, float]] = []
        self._stop_after, self._path = stop_after, path

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.metrics.append({name: value.item() for name, value in trainer.callback_metrics.items()})
        if len(self.metrics) == self._stop_after:
            trainer.save_checkpoint(self._path)
            trainer.should_stop = True


def run(
    engine: Engine,
    path: str,
    stop_after: int | None = None,
    resumed: bool = False,
    ranks: int = 1,
    env: EnvSource = "CartPole-v1",
    data_options: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    total_envs: int | None = None,
) -> Outcome:
    """All iterations, or some of them with a checkpoint at their end, or the rest of them from there on."""
    L.seed_everything(1, verbose=False)
    steps = ITERATIONS * HORIZON * (total_envs or NUM_ENVS * ranks)
    data = RolloutDataModule(
        env,
        num_envs=NUM_ENVS,
        horizon=HORIZON,
        total_timesteps=steps,
        eval_episodes=2,
        **(data_options or {}),
    )
    model = PPO(**OPTIONS | (options or {}))
    ckpt_path, strategy = (path if resumed else None), ("auto" if ranks == 1 else "ddp")
    if engine == "trainer":
        recorder = Recorder(stop_after, path)
        trainer = quiet_trainer(strategy=strategy, devices=ranks, callbacks=[recorder])
        trainer.fit(model, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
        metrics, optimizer = recorder.metrics, trainer.optimizers[0]
    else:
        fabric, metrics = Fabric(accelerator="cpu", strategy=strategy, devices=ranks), []
        fabric.launch()
        for latest in iterations(fabric, model, data, ckpt_path):
            metrics.append(latest)
            if len(metrics) == stop_after:
                save_checkpoint(fabric, path, model, data)
                break
        data.close()
        optimizer = model.trained_by_fabric["optimizer"].optimizer
    state = optimizer.state_dict()
    weights = {name: weight.numpy().copy() for name, weight in model.policy.state_dict().items()}
    moments = [{name: value.numpy().copy() for name, value in of.items()} for of in state["state"].values()]
    draws = torch.rand(()).item(), float(np.random.rand()), random.random()
    return Outcome([without_time(m) for m in metrics], weights, [state["param_groups"], moments], draws)


def on_rank(rank: int, *arguments: Any, **options: Any) -> Outcome:
    return run(*arguments, **options)


def assert_goes_on(whole: Outcome, resumed: Outcome, stop_after: int) -> None:
    assert len(whole.metrics) == ITERATIONS
    assert whole.metrics[-1]["rollout/episodes"] > 4
    assert resumed == dataclasses.replace(whole, metrics=whole.metrics[stop_after:])


@BOTH
@pytest.mark.parametrize("stop_after", [1, 3, 4])
def test_goes_on_as_if_never_stopped(engine: Engine, stop_after: int, tmp_path: Path) -> None:
    path = str(tmp_path / "run.ckpt")
    whole = run(engine, path)
    stopped = run(engine, path, stop_after)
    assert stopped.metrics == whole.metrics[:stop_after]
    assert_goes_on(whole, run(engine, path, resumed=True), stop_after)


@BOTH
def test_on_two_ranks(engine: Engine, tmp_path: Path) -> None:
    path = str(tmp_path / "run.ckpt")
    whole = run_ranks(on_rank, engine, path, None, False, RANKS)
    stopped = run_ranks(on_rank, engine, path, 2, False, RANKS)
    resumed = run_ranks(on_rank, engine, path, None, True, RANKS)
    for rank in range(RANKS):
        assert stopped[rank].metrics == whole[rank].metrics[:2]
        assert_goes_on(whole[rank], resumed[rank], 2)


WORKERS: dict[str, Any] = {"num_workers": 2, "worker_options": {"context": "fork"}}
RUNS: dict[str, dict[str, Any]] = {
    "device environments": {"env": "puffer/TorchCartPole-v0"},
    "a sanity environment": {"env": "puffer/Squared-v0"},
    "single environments": {"env": "MountainCarContinuous-v0"},
    "wrapped ones": {"data_options": {"wrappers": [partial(TimeLimit, max_episode_steps=20)]}},
    "workers": {"env": "Pendulum-v1", "data_options": WORKERS},
    "halves": {"data_options": {**WORKERS, "overlap": "halves", "wrappers": [PassiveEnvChecker]}},
    # 7 steps an episode with the one that resets, of 48: over with the rollout's last one, and 10 of 48.
    "episodes just over": {"data_options": {"env_kwargs": {"max_episode_steps": 6}}},
    "episodes cut off": {"data_options": {"env_kwargs": {"max_episode_steps": 9}}},
    "a memory": {"options": {"policy": LSTMPolicy}},
    "a torch scheduler": {"options": {"lr_schedule": partial(StepLR, step_size=2, gamma=0.5)}},
    "an early stop": {"options": {"target_kl": 1e-4}},
}


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_with(options: dict[str, Any], tmp_path: Path) -> None:
    path = str(tmp_path / "run.ckpt")
    whole = run("fabric", path, **options)
    run("fabric", path, 3, **options)
    resumed = run("fabric", path, resumed=True, **options)
    assert resumed == dataclasses.replace(whole, metrics=whole.metrics[3:])


def test_first_ready_environments_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not bit for bit, since their batches are not the same twice."""
    path, options = str(tmp_path / "run.ckpt"), {**WORKERS, "overlap": "first_ready"}
    run("trainer", path, 2, env="Pendulum-v1", data_options=options)
    ended = torch.load(path, weights_only=True)["ppo"]["ranks"][0]["collector"]["rows"]["stepper"]["ended"]
    assert len(ended) == NUM_ENVS
    with caplog.at_level("INFO"):
        resumed = run("trainer", path, resumed=True, env="Pendulum-v1", data_options=options)
    assert len(resumed.metrics) == ITERATIONS - 2
    assert "cannot go on" not in caplog.text


def test_workers_may_be_others(tmp_path: Path) -> None:
    path, workers = str(tmp_path / "run.ckpt"), {**WORKERS, "num_workers": 4}
    whole = run("fabric", path, env="Acrobot-v1")
    run("fabric", path, 2, env="Acrobot-v1", data_options=WORKERS)
    resumed = run("fabric", path, resumed=True, env="Acrobot-v1", data_options=workers)
    assert resumed == dataclasses.replace(whole, metrics=whole.metrics[2:])


class Unspoken(SyncVectorEnv):
    """Does not say how it stands."""

    seeds: ClassVar[list[Any]] = []

    def __init__(self, num_envs: int) -> None:
        super().__init__(
            [partial(gym.make, "CartPole-v1")] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP
        )

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        if self.num_envs == NUM_ENVS:
            self.seeds.append(seed)
        return super().reset(seed=seed, options=options)


@BOTH
def test_episodes_restart_where_environments_cannot_go_on_and_that_is_said_once(
    engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "run.ckpt")
    Unspoken.seeds.clear()
    run(engine, path, 2, env=Unspoken)
    caplog.clear()
    with caplog.at_level("INFO"):
        resumed = run(engine, path, resumed=True, env=Unspoken)
    assert len(resumed.metrics) == ITERATIONS - 2
    [said] = [record.message for record in caplog.records if "cannot go on" in record.message]
    assert said.endswith("Unspoken has no get_state and set_state.")
    first, *others = Unspoken.seeds
    assert first is not None
    assert first not in others, "new episodes, not those of the beginning"
    again = run(engine, path, resumed=True, env=Unspoken)
    assert again == resumed, "and the same ones each time"


def test_what_is_saved_is_loaded_as_weights_only_and_is_of_every_rank(tmp_path: Path) -> None:
    run_ranks(on_rank, "trainer", str(tmp_path / "run.ckpt"), 2, False, RANKS)
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)["ppo"]
    assert saved["env_steps"] == 2 * HORIZON * NUM_ENVS * RANKS
    assert saved["sizes"]["total_envs"] == NUM_ENVS * RANKS
    one, other = saved["ranks"]
    for owner, generator in (("learner", "shuffling"), ("collector", "actions")):
        assert not torch.equal(one[owner][generator], other[owner][generator])
    assert not torch.equal(one["learner"]["rows"]["discounted"], other["learner"]["rows"]["discounted"])


def first_seen(rank: int, path: str, total_envs: int) -> tuple[Any, int, dict[str, float]]:
    """What a rank of a resumed run acts on first, [N, 4], how many iterations it makes, the last metrics."""
    seen: list[Any] = []
    collect = RolloutDataModule.collect

    def recorded(self: RolloutDataModule, *arguments: Any) -> Any:
        rollout = collect(self, *arguments)
        seen.append(rollout.observations[0].numpy().copy())
        return rollout

    with mock.patch.object(RolloutDataModule, "collect", recorded):
        outcome = run("trainer", path, resumed=True, ranks=world_size(), total_envs=total_envs)
    return seen[0], len(seen), outcome.metrics[-1]


def test_on_other_numbers_of_ranks_the_same_environments_go_on(tmp_path: Path) -> None:
    two, one = str(tmp_path / "two.ckpt"), str(tmp_path / "one.ckpt")
    of_two = run_ranks(on_rank, "trainer", two, 2, False, RANKS)[0]
    of_one = run("trainer", one, 2)
    for path, left, total_envs in ((two, of_two, NUM_ENVS * RANKS), (one, of_one, NUM_ENVS)):
        episodes = left.metrics[-1]["rollout/episodes"]
        by_one, iterations_of_one, metrics = first_seen(0, path, total_envs)
        assert metrics["rollout/episodes"] > episodes
        by_two = run_ranks(first_seen, path, total_envs)
        assert by_one.shape == (total_envs, 4)
        np.testing.assert_array_equal(by_one, np.concatenate([seen for seen, _, _ in by_two]))
        for _, iterations_of_two, metrics_of_two in by_two:
            assert iterations_of_one == iterations_of_two == ITERATIONS - 2
            assert metrics_of_two["rollout/episodes"] > episodes


def test_numbers_of_ranks_that_work_are_named(tmp_path: Path) -> None:
    path = str(tmp_path / "run.ckpt")
    run("trainer", path, 1)
    sizes = read_sizes(path)
    data, config = RolloutDataModule(num_envs=NUM_ENVS, horizon=HORIZON), PPO(**OPTIONS).config
    for ranks in (1, 2, 4, 8):
        data.keep_batch(sizes, config, ranks)
        assert data.envs_of_each(ranks) * ranks == NUM_ENVS
    with pytest.raises(
        ConfigurationError, match=r"The 8 environments .* among 3 ranks: start 1, 2, 4 or 8 of"
    ):
        data.keep_batch(sizes, config, 3)
    config.num_minibatches = 2 * HORIZON
    with pytest.raises(ConfigurationError, match="among 8 ranks: start 1 or 2 of"):
        data.keep_batch(sizes, config, 8)
    other = RolloutDataModule(num_envs=2 * NUM_ENVS, horizon=HORIZON)
    other.keep_batch(sizes, config, 3)
    assert other.envs_of_each(3) == 2 * NUM_ENVS, "the option wins where it is another"
