"""The default configuration solves its task."""

from pathlib import Path

import pytest
import yaml
from lightning.fabric import Fabric
from lightning.pytorch.cli import LightningCLI

from puffer_lightning.engines import PPO, RolloutDataModule, iterations

CONFIG = Path(__file__).parents[2] / "configs" / "ppo.yaml"
SOLVED_AT = 475.0


@pytest.mark.slow
def test_the_default_configuration_solves_cart_pole() -> None:
    config = yaml.safe_load(CONFIG.read_text())
    assert config["data"]["env"] == "CartPole-v1"
    cli = LightningCLI(
        PPO,
        RolloutDataModule,
        save_config_callback=None,
        seed_everything_default=1,
        trainer_defaults={"accelerator": "cpu", "logger": False, "enable_checkpointing": False},
        args={room: config[room] for room in ("model", "data")},
        run=False,
        auto_configure_optimizers=False,
    )
    for _ in iterations(Fabric(accelerator="cpu", devices=1), cli.model, cli.datamodule):
        pass
    assert cli.datamodule.eval_greedy
    returns = cli.datamodule.evaluate(cli.model.policy).returns
    cli.datamodule.close()

    assert len(returns) == 100
    assert returns.mean() >= SOLVED_AT
