"""Environments that return NaN, from the command line and on two ranks."""

import warnings
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor

from puffer_lightning.engines import PPO, FabricFSDP, RolloutDataModule, iterations
from puffer_lightning.ppo import NonFiniteError
from tests.commandline import QUICK, STEPS_PER_ITERATION, column, refused, run
from tests.distributed.processes import RANKS, run_ranks
from tests.equivalence.runs import quiet_trainer
from tests.faulty import NonFinite

HERE = "of environment 2 at step 4 of the rollout"


def nan(kind: str, begin: int, end: int) -> list[str]:
    """Options that put NaN in steps of the third of 8 environments; a rollout has 16 steps."""
    return [
        "--data.env=tests.faulty.NonFinite",
        f'--data.env_kwargs={{"kind": "{kind}", "rank": 0, "begin": {begin}, "end": {end}}}',
        "--checkpoint.every_n_iterations=1",
    ]


@pytest.mark.parametrize("kind", ["observation", "reward"])
def test_a_run_outlives_a_nan(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    normalized = ["--model.normalize_observations=true", "--model.normalize_rewards=true"]
    # An observation is the one that the next step starts from.
    step = 20 - (kind == "observation")
    with pytest.warns(UserWarning, match=f"skipped.*first for nan in {kind} {HERE}"):
        run("fit", *nan(kind, step, step + 1), *normalized)
    skipped = list(column("train/skipped").values())
    assert skipped[0] == skipped[2] == 0
    assert 0 < skipped[1] <= 16
    saved = torch.load("lightning_logs/version_0/checkpoints/last.ckpt")["state_dict"]
    assert all(tensor.isfinite().all() for name, tensor in saved.items() if name.startswith("policy."))


def test_a_run_that_goes_on_like_that_stops_with_what_there_is_to_look_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    saved = Path("lightning_logs/version_0/checkpoints")
    with pytest.warns(UserWarning, match=f"skipped.*first for nan in reward {HERE}"):
        message = refused(capsys, "fit", *QUICK, *nan("reward", 20, 100), "--model.max_skipped_updates=2")
    assert f"nan in reward {HERE.replace('step 4', 'step 0')}" in message
    assert f"the rollout is in {saved / 'bad_batch.pt'}" in message
    assert f"the last good checkpoint is ./{saved / 'last.ckpt'}" in message
    batch = torch.load(saved / "bad_batch.pt", weights_only=True)
    assert batch["rewards"].isnan().any(0).tolist() == [row == 2 for row in range(8)]
    assert torch.load(saved / "last.ckpt")["ppo"]["env_steps"] == STEPS_PER_ITERATION, "of before"


def two(
    process: int, engine: str, strategy: str, folder: Path, begin: int, end: int
) -> tuple[list[Tensor], list[float], str, list[str]]:
    """Weights, skipped minibatches, what ended a run of which rank 1 meets NaN, and warnings."""
    L.seed_everything(1, verbose=False)
    data = RolloutDataModule(
        NonFinite,
        {"kind": "observation", "rank": 1, "begin": begin, "end": end},
        num_envs=8,
        horizon=16,
        total_timesteps=4 * 8 * 16 * RANKS,
    )
    model, skipped, ended = PPO(max_skipped_updates=2), [], ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if engine == "trainer":
                seen = L.Callback()
                seen.on_train_batch_end = lambda trainer, *_: skipped.append(  # type: ignore[method-assign]
                    trainer.callback_metrics["train/skipped"].item()
                )
                run_ = quiet_trainer(
                    strategy=strategy, devices=RANKS, callbacks=[seen], default_root_dir=folder
                )
                run_.fit(model, datamodule=data)
            else:
                fabric = Fabric(
                    accelerator="cpu",
                    strategy=FabricFSDP() if strategy == "fsdp" else strategy,
                    devices=RANKS,
                )
                fabric.launch()
                skipped.extend(metrics["train/skipped"] for metrics in iterations(fabric, model, data))
        except NonFiniteError as error:
            ended = str(error)
    said = [str(warning.message) for warning in caught if "skipped" in str(warning.message)]
    weights = [getattr(p, "full_tensor", p.detach)().detach() for p in model.policy.parameters()]
    return weights, skipped, ended, said


@pytest.mark.parametrize(
    ("engine", "strategy"), [("trainer", "ddp"), ("trainer", "fsdp"), ("fabric", "ddp"), ("fabric", "fsdp")]
)
class TestOnTwoRanks:
    def test_what_one_meets_both_skip(self, engine: str, strategy: str, tmp_path: Path) -> None:
        (weights, skipped, _, said), (others, *rest, unsaid) = run_ranks(
            two, engine, strategy, tmp_path, 20, 21
        )
        assert rest[0] == skipped
        assert 0 < skipped[1] <= 16
        assert sum(skipped) == skipped[1]
        for one, other in zip(weights, others, strict=True):
            assert one.isfinite().all()
            assert torch.equal(one, other)
        assert "first for rank 1: nan in observation of environment 2 at step 5 of the rollout" in said[0]
        assert (len(said), unsaid) == (1, []), "by one rank, once"

    def test_both_stop(self, engine: str, strategy: str, tmp_path: Path) -> None:
        for _, skipped, ended, _ in run_ranks(two, engine, strategy, tmp_path, 20, 1000):
            assert len(skipped) == 2
            assert "2 iterations in a row" in ended
            assert "rank 1: nan in observation of environment 2 at step 0" in ended
        if engine == "trainer":
            batch = torch.load(tmp_path / "bad_batch.pt", weights_only=True)
            assert batch["observations"][:, 2].isnan().all(), "of rank 1"
