"""Two ranks, one of which has slow environments."""

import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym

from puffer_lightning.callbacks import Stragglers
from puffer_lightning.distributed import rank
from puffer_lightning.ppo import Metrics
from tests.callbacks.runs import PPO, data, heard, trainer
from tests.distributed.processes import run_ranks

SLOW = 1


class Sleepy(gym.Wrapper[Any, Any, Any, Any]):
    def step(self, action: Any) -> Any:
        time.sleep(0.002 if rank() == SLOW else 0.0)
        return self.env.step(action)


def make(num_envs: int) -> gym.vector.SyncVectorEnv:
    return gym.vector.SyncVectorEnv([lambda: Sleepy(gym.make("CartPole-v1"))] * num_envs)


def fit(this_rank: int, folder: Path) -> tuple[Metrics, list[list[float]], str]:
    run = trainer(Stragglers(), folder=folder, devices=2, strategy="ddp")
    with heard() as said:
        run.fit(model := PPO(), datamodule=data(6, env=partial(make)))
    metrics = {name: value.item() for name, value in run.callback_metrics.items()}
    return metrics, model.learner.rank_seconds, said.getvalue()


def test_names_the_rank_with_the_slow_environments(tmp_path: Path) -> None:
    (metrics, seconds, said), (of_the_other, seconds_there, said_there) = run_ranks(fit, tmp_path)
    assert metrics["ranks/slowest"] == SLOW
    assert metrics["ranks/slowdown"] > 1.5
    assert 0.0 < metrics["ranks/waiting_share"] < 0.5
    assert seconds == seconds_there
    assert seconds[SLOW][0] > 4 * 32 * 0.002
    # The other rank's update is the longer one: it waits there.
    assert seconds[1 - SLOW][1] > seconds[SLOW][1]
    for name in ("ranks/slowest", "ranks/slowdown", "ranks/waiting_share"):
        assert metrics[name] == of_the_other[name]
    [(share, times)] = re.findall(
        r"Rank 1 was the slowest to collect in (\d+)% of iterations, then at ([\d.]+) times", said
    )
    assert int(share) > 50
    assert float(times) > 1.5
    assert "slowest" not in said_there


def test_one_process_has_nobody_to_wait_for(tmp_path: Path) -> None:
    run = trainer(Stragglers(), folder=tmp_path)
    with heard() as said:
        run.fit(PPO(), datamodule=data(2))
    assert not [name for name in run.callback_metrics if name.startswith("ranks/")]
    assert "slowest" not in said.getvalue()
