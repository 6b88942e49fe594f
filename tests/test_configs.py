from pathlib import Path

import pytest
import yaml

from puffer_lightning.shipped import shipped_configs
from tests.commandline import column, run

CONFIGS = sorted(shipped_configs().glob("*.yaml"))


def test_there_are_some() -> None:
    assert {"ppo.yaml", "pendulum.yaml"} <= {path.name for path in CONFIGS}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_runs(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = yaml.safe_load(config.read_text())
    horizon = min(shipped["data"]["horizon"], 64)
    steps = shipped["data"]["num_envs"] * horizon
    run(
        "fit",
        *(f"--data.{name}={shipped['data'][name]}" for name in ("num_envs", "env")),
        f"--config={config.name}",
        f"--data.horizon={horizon}",
        f"--data.total_timesteps={3 * steps}",
        "--data.eval_episodes=2",
    )
    assert list(column("train/entropy")) == [steps, 2 * steps, 3 * steps]
    assert list(column("val/episode_return")) == [3 * steps]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_says_what_it_is(config: Path) -> None:
    first = config.read_text().splitlines()[0]
    assert first.startswith("# ")
    assert yaml.safe_load(config.read_text())["data"]["env"] in first or config.name == "ppo.yaml"
