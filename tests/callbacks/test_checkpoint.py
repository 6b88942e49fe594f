from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from puffer_lightning.callbacks import Checkpoint
from puffer_lightning.errors import ConfigurationError
from tests.callbacks.runs import PPO, STEPS_PER_ITERATION, Break, data, trainer


class Score(Callback):
    """A metric whose values are known; None where it was not measured."""

    def __init__(self, *scores: float | None) -> None:
        self.scores = scores

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        score = self.scores[trainer.current_epoch]
        if score is not None:
            trainer.callback_metrics["score"] = torch.tensor(score)


class ValidationScore(Score):
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        pass

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.callback_metrics["val/score"] = torch.tensor(self.scores[trainer.current_epoch])


def load(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def iteration(path: Path) -> int:
    """After which iteration, from 1, a checkpoint was written."""
    steps: int = load(path)["ppo"]["env_steps"]
    return steps // STEPS_PER_ITERATION


def fit(
    folder: Path,
    *callbacks: Callback,
    iterations: int = 5,
    ckpt_path: Path | None = None,
    monitor: str = "score",
    mode: Literal["min", "max"] = "max",
    every_n_iterations: int = 1,
    **options: Any,
) -> Checkpoint:
    checkpoint = Checkpoint(str(folder), monitor, mode, every_n_iterations)
    run = trainer(*callbacks, checkpoint, folder=folder, **options)
    run.fit(PPO(), datamodule=data(iterations), ckpt_path=ckpt_path)
    return checkpoint


@pytest.mark.parametrize(("mode", "best"), [("max", 4), ("min", 2)])
def test_keeps_the_best_and_the_last(tmp_path: Path, mode: Literal["min", "max"], best: int) -> None:
    checkpoint = fit(tmp_path, Score(3.0, 1.0, 2.0, 9.0, 9.0), mode=mode)
    assert {path.name for path in tmp_path.iterdir()} == {"best.ckpt", "last.ckpt"}
    assert iteration(tmp_path / "best.ckpt") == best
    assert iteration(tmp_path / "last.ckpt") == 5
    assert checkpoint.best_model_path == str(tmp_path / "best.ckpt")


def test_looks_every_so_often_and_at_the_end(tmp_path: Path) -> None:
    fit(tmp_path / "a", Score(9.0, 1.0, 5.0, 3.0, 4.0), every_n_iterations=2)
    assert iteration(tmp_path / "a" / "best.ckpt") == 5
    assert iteration(tmp_path / "a" / "last.ckpt") == 5
    fit(tmp_path / "b", Score(9.0, 1.0, 5.0, 3.0, 2.0), every_n_iterations=2)
    assert iteration(tmp_path / "b" / "best.ckpt") == 4
    assert iteration(tmp_path / "b" / "last.ckpt") == 5


def test_the_best_by_return_of_a_real_run(tmp_path: Path) -> None:
    class Returns(Callback):
        seen: list[float] = []  # noqa: RUF012

        def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
            self.seen.append(trainer.callback_metrics["rollout/episode_return"].item())

    fit(tmp_path, returns := Returns(), monitor="rollout/episode_return")
    assert iteration(tmp_path / "best.ckpt") == returns.seen.index(max(returns.seen)) + 1


def test_waits_for_a_metric_that_is_not_there_yet(tmp_path: Path) -> None:
    # With a validation before, Lightning's own ModelCheckpoint ends the run here.
    fit(tmp_path, Score(None, None, 2.0, 1.0, 1.0), validate_every=1)
    assert iteration(tmp_path / "best.ckpt") == 3


def test_says_so_if_the_metric_never_came(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        fit(tmp_path, iterations=1)
    assert "No best.ckpt was written, as score was never measured" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("iterations", [4, 5])
def test_a_metric_of_validation_counts_when_it_is_measured(tmp_path: Path, iterations: int) -> None:
    scores = ValidationScore(9.0, 2.0, 9.0, 3.0, 9.0)
    fit(tmp_path, scores, monitor="val/score", every_n_iterations=3, validate_every=2, iterations=iterations)
    assert iteration(tmp_path / "best.ckpt") == 4
    assert iteration(tmp_path / "last.ckpt") == iterations


@pytest.mark.parametrize(
    ("hook", "at", "exception"),
    [
        ("on_train_batch_start", 3, KeyboardInterrupt()),
        ("on_train_batch_end", 4, RuntimeError("stop")),
        ("on_validation_start", 4, KeyboardInterrupt()),
    ],
)
def test_an_interruption_writes_the_last_and_leaves_the_best(
    tmp_path: Path, exception: BaseException, hook: str, at: int
) -> None:
    stop = Break(3, exception, hook)
    with pytest.raises((SystemExit, RuntimeError)):
        fit(tmp_path, Score(1.0, 5.0, 2.0, 9.0), stop, every_n_iterations=2, validate_every=1)
    assert iteration(tmp_path / "last.ckpt") == at
    assert iteration(tmp_path / "best.ckpt") == 2
    fit(tmp_path, Score(*[0.0] * 5), ckpt_path=tmp_path / "last.ckpt", validate_every=1)
    assert iteration(tmp_path / "last.ckpt") == 5


def test_an_interruption_amid_the_update_can_be_resumed(tmp_path: Path) -> None:
    class Interrupt(Callback):
        def on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
            if trainer.current_epoch == 2 and trainer.global_step % 16 == 7:
                raise KeyboardInterrupt

    run = trainer(Checkpoint(str(tmp_path), monitor="score"), Interrupt(), folder=tmp_path)
    with pytest.raises(SystemExit):
        run.fit(PPO(), datamodule=data(5))
    assert load(tmp_path / "last.ckpt")["global_step"] % 16 == 7
    assert iteration(tmp_path / "last.ckpt") == 2
    fit(tmp_path, Score(*[0.0] * 5), ckpt_path=tmp_path / "last.ckpt")
    assert iteration(tmp_path / "last.ckpt") == 5


def test_an_exception_before_training_writes_nothing(tmp_path: Path) -> None:
    class Setup(Callback):
        def on_fit_start(self, *_: Any) -> None:
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fit(tmp_path, Setup())
    assert not list(tmp_path.iterdir())


def test_one_of_several_ranks_does_not_save_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "world_size", 2)
    with pytest.raises(RuntimeError, match="stop"):
        fit(tmp_path, Score(1.0, 1.0), Break(1, RuntimeError("stop")), every_n_iterations=5)
    assert not list(tmp_path.iterdir())


def test_a_trial_run_writes_nothing(tmp_path: Path) -> None:
    fit(tmp_path, Score(1.0), fast_dev_run=True)
    assert not list(tmp_path.iterdir())


class TestResumedInAnotherFolder:
    def test_the_best_so_far_is_remembered(self, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
        fit(tmp_path / "a", Score(1.0, 7.0, 2.0), iterations=3)
        worse = fit(tmp_path / "b", Score(*[3.0] * 5), ckpt_path=tmp_path / "a" / "last.ckpt")
        assert [path.name for path in (tmp_path / "b").iterdir()] == ["last.ckpt"]
        assert worse.best_model_path == str(tmp_path / "a" / "best.ckpt")
        fit(tmp_path / "c", Score(*[8.0] * 5), ckpt_path=tmp_path / "a" / "last.ckpt")
        assert iteration(tmp_path / "c" / "best.ckpt") == 4
        assert iteration(tmp_path / "a" / "best.ckpt") == 2
        assert not [warning for warning in recwarn if "dirpath has changed" in str(warning.message)]

    def test_a_best_that_is_gone_is_not_missed(self, tmp_path: Path) -> None:
        fit(tmp_path / "a", Score(1.0, 7.0, 2.0), iterations=3)
        (tmp_path / "a" / "best.ckpt").unlink()
        fit(tmp_path / "b", Score(*[3.0] * 5), ckpt_path=tmp_path / "a" / "last.ckpt")
        assert iteration(tmp_path / "b" / "best.ckpt") == 4


class TestWholeFiles:
    def test_a_failed_save_leaves_the_file_before(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save, saves = TorchCheckpointIO.save_checkpoint, []

        def fail_at_the_third(io: TorchCheckpointIO, checkpoint: Any, path: Any, *args: Any) -> None:
            saves.append(path)
            if len(saves) >= 3:
                Path(path).write_bytes(b"half")
                raise OSError("disk full")
            save(io, checkpoint, path, *args)

        monkeypatch.setattr(TorchCheckpointIO, "save_checkpoint", fail_at_the_third)
        with pytest.raises(OSError, match="disk full"):
            fit(tmp_path)
        assert iteration(tmp_path / "last.ckpt") == 2

    def test_the_users_own_way_of_writing_is_kept(self, tmp_path: Path) -> None:
        class Own(TorchCheckpointIO):
            pass

        run = trainer(Checkpoint(str(tmp_path)), folder=tmp_path, plugins=[Own()])
        run.fit(PPO(), datamodule=data(1))
        assert type(run.strategy.checkpoint_io) is Own
        assert iteration(tmp_path / "last.ckpt") == 1


def test_writes_beside_the_logs_by_default(tmp_path: Path) -> None:
    run = trainer(Checkpoint(), folder=tmp_path)
    run.fit(PPO(), datamodule=data(1))
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()


@pytest.mark.parametrize("option", [{"every_n_iterations": 0}, {"mode": "most"}])
def test_refuses_options_out_of_range(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"{next(iter(option))} is {next(iter(option.values()))}"):
        Checkpoint(**option)
