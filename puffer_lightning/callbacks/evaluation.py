"""``EvaluationReport``: one line for each evaluation."""

from typing import Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from puffer_lightning.callbacks.protocols import env_name, ppo_parts


class EvaluationReport(Callback):
    """Prints the result of each validation and test, on rank 0.

    Such as ``evaluation after 204,800 steps: 100 greedy episodes of CartPole-v1, return 500.00 ± 0.00,
    length 500.0 ± 0.0``: mean ± standard deviation over the episodes of all ranks. Where there are several
    types of agents, the mean return of each follows.

    Raises:
        ConfigurationError: The module is not ``PPO``.
    """

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        ppo_parts(trainer, self)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._report(trainer, pl_module, "val")

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._report(trainer, pl_module, "test")

    def _report(self, trainer: Trainer, pl_module: LightningModule, stage: Literal["val", "test"]) -> None:
        module, data = ppo_parts(trainer, self)
        # Read on all ranks, since reading may reduce; printed on rank 0, by Lightning's ``print``.
        metrics = trainer.callback_metrics
        mean, deviation, length, length_deviation = (
            metrics[f"{stage}/episode_{name}"].item()
            for name in ("return", "return_std", "length", "length_std")
        )
        prefix = f"{stage}/episode_return/"
        by_type = "".join(
            f", {name.removeprefix(prefix)} {value.item():.2f}"
            for name, value in metrics.items()
            if name.startswith(prefix)
        )
        how, plural = "greedy" if data.eval_greedy else "sampled", "s" if data.eval_episodes != 1 else ""
        pl_module.print(
            f"evaluation after {module.env_steps:,} steps: {data.eval_episodes} {how} episode{plural} of "
            f"{env_name(data.env)}, return {mean:.2f} ± {deviation:.2f}, "
            f"length {length:.1f} ± {length_deviation:.1f}{by_type}"
        )
