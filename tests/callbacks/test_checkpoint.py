import resource
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from puffer_lightning.callbacks import Checkpoint
from puffer_lightning.callbacks.checkpoint import newest_last
from puffer_lightning.callbacks.checkpoint_io import WholeFileIO, check_checkpoint
from puffer_lightning.engines import FSDP
from puffer_lightning.errors import ConfigurationError
from tests.callbacks.runs import PPO, STEPS_PER_ITERATION, Break, data, trainer
from tests.distributed.processes import run_ranks


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
    every_n_iterations: int | None = 1,
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


@pytest.mark.parametrize(("seconds", "kept"), [(0.0, [0, 1, 2]), (30.0, [0, 0, 0])])
def test_looks_by_the_time_trained_if_not_told_how_often(
    tmp_path: Path, seconds: float, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{Checkpoint.__module__}._SECONDS", seconds)
    files = Kept(tmp_path)
    fit(tmp_path, Score(1.0, 2.0, 3.0), files, iterations=3, every_n_iterations=None)
    assert [of.get("last.ckpt", 0) for of in files.seen] == kept
    assert iteration(tmp_path / "last.ckpt") == iteration(tmp_path / "best.ckpt") == 3


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


class FullDisk(Callback):
    """Lets no file grow beyond a kilobyte during some iterations (from 0), on one rank."""

    def __init__(self, *iterations: int, rank: int = 0) -> None:
        self.iterations, self.rank = iterations, rank

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_rank == self.rank:
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            full = trainer.current_epoch in self.iterations
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024 if full else hard, hard))

    def teardown(self, *_: Any, **__: Any) -> None:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    on_exception = teardown


class Kept(Callback):
    """After which iteration, from 1, each file was written, as of the start of each iteration."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: list[dict[str, int]] = []

    def on_train_epoch_start(self, *_: Any) -> None:
        # What a folder holds is looked at by tests of sharded policies.
        self.seen.append(
            {path.name: iteration(path) if path.is_file() else 0 for path in self.folder.glob("*")}
        )


class TestFullDisk:
    def test_training_goes_on_and_the_files_before_remain(
        self, tmp_path: Path, recwarn: pytest.WarningsRecorder
    ) -> None:
        scores = Score(1.0, 2.0, 9.0, 8.0, 3.0, 4.0)
        checkpoint = fit(tmp_path, scores, FullDisk(2, 3), kept := Kept(tmp_path), iterations=6)
        before = {"best.ckpt": 2, "last.ckpt": 2}
        # The fifth beats the second, and not the third and fourth, of which nothing was kept.
        assert kept.seen[2:] == [before, before, before, {"best.ckpt": 5, "last.ckpt": 5}]
        assert iteration(tmp_path / "last.ckpt") == iteration(tmp_path / "best.ckpt") == 6
        assert checkpoint.best_model_score == 4.0
        said = [str(warning.message) for warning in recwarn if "could not be written" in str(warning.message)]
        assert len(said) == 4
        assert said[0].startswith(f"{tmp_path}/best.ckpt could not be written after 384 environment steps (")

    def test_at_the_end_of_training_too(self, tmp_path: Path) -> None:
        with pytest.warns(UserWarning, match=r"last\.ckpt could not be written after 256 env"):
            fit(tmp_path, Score(2.0, 1.0), FullDisk(1), iterations=2)
        assert {path.name: iteration(path) for path in tmp_path.iterdir()} == {"best.ckpt": 1, "last.ckpt": 1}

    @pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
    @pytest.mark.parametrize("full", [0, 1])
    def test_ranks_agree_that_nothing_was_saved(self, tmp_path: Path, strategy: str, full: int) -> None:
        expected = {"ddp": full == 1, "fsdp": False}[strategy]
        for saved, number in run_ranks(save_on_a_full_disk, tmp_path, strategy, full):
            assert saved == [True, expected, True]
            assert number == 3
        assert {path.name for path in tmp_path.iterdir()} == {"best.ckpt", "last.ckpt"}


class Saved(Callback):
    """Whether each iteration left a last.ckpt."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.current_epoch:
            self.seen.append(trainer.checkpoint_callback._saved)  # type: ignore[union-attr]

    on_train_end = on_train_epoch_start


def save_on_a_full_disk(rank: int, folder: Path, strategy: str, full: int) -> tuple[list[bool], int]:
    chosen: Any = FSDP(save_distributed_checkpoint=True) if strategy == "fsdp" else strategy
    checkpoint, saved = Checkpoint(str(folder), "score", every_n_iterations=1), Saved()
    run = trainer(
        FullDisk(1, rank=full),
        Score(*[1.0] * 3),
        saved,
        checkpoint,
        folder=folder,
        devices=2,
        strategy=chosen,
    )
    run.fit(PPO(), datamodule=data(6))
    last = check_and_read(folder / "last.ckpt")
    return saved.seen, last["ppo"]["env_steps"] // (2 * STEPS_PER_ITERATION)


def check_and_read(path: Path) -> dict[str, Any]:
    check_checkpoint(path)
    return WholeFileIO().load_checkpoint(path)


def limited(rank: int, folder: Path) -> int:
    run = trainer(Checkpoint(str(folder)), folder=folder, devices=2, strategy="ddp", max_time={"seconds": 1})
    run.fit(model := PPO(), datamodule=data(10**6))
    return model.env_steps


def test_a_time_limit_saves_at_its_end_on_all_ranks(tmp_path: Path) -> None:
    one, other = run_ranks(limited, tmp_path)
    assert load(tmp_path / "last.ckpt")["ppo"]["env_steps"] == one == other


class TestNewest:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Trainer:
        fit(tmp_path, Score(3.0, 2.0), iterations=2)
        return trainer(Checkpoint(str(tmp_path)), folder=tmp_path)

    def test_the_last_is_newer_than_the_best(self, run: Trainer, tmp_path: Path) -> None:
        assert newest_last(run) == tmp_path / "last.ckpt"

    @pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
    def test_the_damaged_are_named_and_passed_over(self, run: Trainer, tmp_path: Path, damage: str) -> None:
        data = (tmp_path / "last.ckpt").read_bytes()
        middle = len(data) // 2
        (tmp_path / "last.ckpt").write_bytes(
            {"cut": data[:middle], "changed": data[:middle] + b"?" + data[middle + 1 :], "empty": b""}[damage]
        )
        with pytest.warns(UserWarning, match=r"Passing over .*/last\.ckpt, which is not whole: its end is"):
            assert newest_last(run) == tmp_path / "best.ckpt"

    def test_none_is_left(self, run: Trainer, tmp_path: Path) -> None:
        for path in tmp_path.glob("*.ckpt"):
            path.write_bytes(b"")
        with pytest.warns(UserWarning, match="Passing over"):
            assert newest_last(run) is None


class TestWholeFiles:
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
