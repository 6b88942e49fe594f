from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from puffer_lightning.callbacks import EpisodeWriter
from puffer_lightning.callbacks.episodes import write_episodes
from puffer_lightning.errors import ConfigurationError
from puffer_lightning.rollout import Episodes, Trajectory
from tests.callbacks.runs import PPO, Other, data, trainer
from tests.environments import MODES, SCHEDULES, Place, counters, reward

ROWS, EPISODES = 3, 7


def three_counters(num_envs: int, mode: AutoresetMode) -> VectorEnv:
    return counters(mode, SCHEDULES[:ROWS])


def predict(path: Path, env: Any = "CartPole-v1", **options: Any) -> dict[str, NDArray[Any]]:
    run = trainer(EpisodeWriter(str(path)), folder=path.parent)
    run.predict(PPO(), datamodule=data(env=env, **options), return_predictions=False)
    with np.load(path) as file:
        return dict(file)


@pytest.mark.parametrize("mode", MODES)
def test_the_file_holds_the_episodes_end_to_end(tmp_path: Path, mode: AutoresetMode) -> None:
    written = predict(tmp_path / "new" / "run.npz", lambda n: three_counters(n, mode), eval_episodes=EPISODES)
    places, ends = [], []
    for episode in range(EPISODES):
        row, nth = episode % ROWS, episode // ROWS
        length, ending = SCHEDULES[row][nth % len(SCHEDULES[row])]
        places += [Place(row, nth, step) for step in range(length)]
        ends += [None] * (length - 1) + [ending]
    assert written.keys() == {
        "observations",
        "actions",
        "rewards",
        "terminations",
        "truncations",
        "episode_lengths",
        "episode_returns",
    }
    np.testing.assert_array_equal(written["observations"], np.array(places))
    np.testing.assert_allclose(written["rewards"], [reward(place) for place in places])
    assert written["terminations"].tolist() == [end in ("terminated", "both") for end in ends]
    assert written["truncations"].tolist() == [end == "truncated" for end in ends]
    assert written["actions"].shape == (len(places),)
    assert written["observations"].dtype == np.float32
    assert written["terminations"].dtype == np.bool_
    assert len(written["episode_lengths"]) == EPISODES


def test_episodes_can_be_told_apart(tmp_path: Path) -> None:
    written = predict(tmp_path / "episodes.npz", eval_episodes=5, eval_greedy=False)
    assert len(set(written["episode_lengths"])) > 1
    rewards = np.split(written["rewards"], written["episode_lengths"].cumsum()[:-1])
    assert [part.sum() for part in rewards] == written["episode_returns"].tolist()
    assert (
        np.flatnonzero(written["terminations"] | written["truncations"]).tolist()
        == (written["episode_lengths"].cumsum() - 1).tolist()
    )


def played(*lengths: int, observe: Any = None) -> Episodes:
    trajectories = [
        Trajectory(
            observations=(observe or (lambda steps: steps))(np.arange(length)),
            actions=np.zeros((length, 2)),
            rewards=np.ones(length),
            terminated=True,
        )
        for length in lengths
    ]
    return Episodes(np.array(lengths, dtype=np.float64), np.array(lengths), trajectories)


def test_parts_of_observations_are_named(tmp_path: Path) -> None:
    path = tmp_path / "episodes.npz"
    write_episodes(path, played(2, 1, observe=lambda t: {"image": t, "sensors": (10 * t, {"far": 20 * t})}))
    with np.load(path) as file:
        observations = {name: file[name].tolist() for name in file if name.startswith("observations")}
    assert observations == {
        "observations/image": [0, 1, 0],
        "observations/sensors/0": [0, 10, 0],
        "observations/sensors/1/far": [0, 20, 0],
    }


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "episodes.npz"
    write_episodes(path, played(1))
    before = path.read_bytes()

    def fail(file: Any, **_: Any) -> None:
        file.write(b"half")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez_compressed", fail)
        with pytest.raises(OSError, match="disk full"):
            write_episodes(path, played(2))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    write_episodes(path, played(2))
    assert path.read_bytes() != before
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_may_be_read_like_any_other(tmp_path: Path) -> None:
    path, other = tmp_path / "episodes.npz", tmp_path / "other"
    write_episodes(path, played(1))
    other.touch()
    assert path.stat().st_mode == other.stat().st_mode


def test_nothing_played_is_nothing_written(tmp_path: Path) -> None:
    run = trainer(writer := EpisodeWriter(str(tmp_path / "episodes.npz")), folder=tmp_path)
    writer.on_predict_batch_end(run, PPO(), Episodes(np.zeros(0), np.zeros(0, dtype=np.int64)), None, 0)
    assert not list(tmp_path.iterdir())


def test_predicting_says_what_it_wrote_and_warns_of_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    written = predict(tmp_path / "episodes.npz")
    steps = len(written["rewards"])
    assert f"2 episodes, {steps} steps, written to {tmp_path / 'episodes.npz'}" in capsys.readouterr().out
    assert not [warning for warning in recwarn if "batch indices" in str(warning.message)]


def test_refuses_another_ending() -> None:
    with pytest.raises(ConfigurationError, match=r"path is episodes\.csv: .* \.npz"):
        EpisodeWriter("episodes.csv")


def test_refuses_another_module(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"EpisodeWriter works with PPO and RolloutDataModule"):
        trainer(EpisodeWriter(), folder=tmp_path).predict(Other(), datamodule=data())
