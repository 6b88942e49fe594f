import contextlib
import fcntl
import os
import pty
import re
import struct
import termios
import threading
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from tqdm import tqdm

from puffer_lightning.callbacks import EvaluationReport, Progress, progress
from puffer_lightning.errors import ConfigurationError
from tests.callbacks.runs import PPO, Break, Other, data, trainer


class Terminal:
    """Within its context, standard error is a terminal; ``text`` is what was written to it."""

    def __init__(self, columns: int = 120) -> None:
        self._screen, keyboard = pty.openpty()
        fcntl.ioctl(keyboard, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self._file = os.fdopen(keyboard, "w")
        self._reader = threading.Thread(target=self._read)
        self._seen = b""
        self.text = ""

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while read := os.read(self._screen, 4096):
                self._seen += read

    def __enter__(self) -> "Terminal":
        self._reader.start()
        self._redirection = contextlib.redirect_stderr(self._file)
        self._redirection.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._redirection.__exit__(*exception)
        self._file.close()
        self._reader.join()
        os.close(self._screen)
        self.text = self._seen.decode()


@pytest.fixture
def each_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.0)


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if " steps (" in line]


class TestElsewhereThanOnATerminal:
    def test_the_end_is_one_plain_line(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        trainer(Progress(), folder=tmp_path).fit(PPO(), datamodule=data(3))
        error = capsys.readouterr().err
        (line,) = lines(error)
        assert re.fullmatch(
            r"384 of 384 steps \(100%\), [\d,]+ SPS, return [\d.]+, 00:\d\d elapsed, 00:00 left", line
        )
        assert "\r" not in error

    @pytest.mark.usefixtures("each_iteration")
    def test_lines_count_environment_steps(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        trainer(Progress(), folder=tmp_path, validate_every=1).fit(PPO(), datamodule=data(4))
        shown = [line.partition(",")[0] for line in lines(capsys.readouterr().err)]
        assert shown == [
            "128 of 512 steps (25%)",
            "256 of 512 steps (50%)",
            "384 of 512 steps (75%)",
            "512 of 512 steps (100%)",
        ]

    def test_a_run_that_ends_early_shows_where(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        trainer(Progress(), folder=tmp_path, max_epochs=2).fit(PPO(), datamodule=data(4))
        assert [line[:20] for line in lines(capsys.readouterr().err)] == ["256 of 512 steps (50"]

    def test_the_last_rollout_may_go_beyond_the_total(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source = data(2)
        source.total_timesteps = 200
        trainer(Progress(), folder=tmp_path).fit(PPO(), datamodule=source)
        assert lines(capsys.readouterr().err)[-1].startswith("256 of 256 steps (100%)")

    def test_return_and_rate_are_those_of_the_metrics(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run = trainer(Progress(), folder=tmp_path)
        run.fit(PPO(), datamodule=data(2))
        (line,) = lines(capsys.readouterr().err)
        assert f"{run.callback_metrics['time/sps'].item():,.0f} SPS" in line
        assert f"return {run.callback_metrics['rollout/episode_return'].item():.4g}," in line

    def test_no_return_before_the_first_episode_has_ended(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source = data(1, horizon=2)
        source.total_timesteps = 8
        trainer(Progress(), folder=tmp_path).fit(PPO(), datamodule=source)
        (line,) = lines(capsys.readouterr().err)
        assert "SPS" in line
        assert "return" not in line

    def test_a_terminal_without_width_gets_lines_too(self, tmp_path: Path) -> None:
        with Terminal(columns=0) as terminal:
            trainer(Progress(), folder=tmp_path).fit(PPO(), datamodule=data(1))
        assert lines(terminal.text)[-1].startswith("128 of 128 steps (100%)")


class TestOnATerminal:
    def test_one_bar_for_the_whole_run(self, tmp_path: Path) -> None:
        with Terminal() as terminal:
            trainer(Progress(refresh_seconds=0), folder=tmp_path).fit(PPO(), datamodule=data(4))
        text = terminal.text
        for shown in ("  0%|", " 25%|", " 50%|", " 75%|", "100%|", " 512/512 steps [", " SPS, return "):
            assert shown in text
        # All on one line of the screen, which stays.
        assert len([line for line in text.split("\n") if "|" in line]) == 1
        assert text.rstrip("\r\n").rpartition("\r")[2].startswith("100%|")
        assert text.endswith("\n")

    def test_redraws_no_more_often_than_it_should(self, tmp_path: Path) -> None:
        run = trainer(Progress(refresh_seconds=1000), folder=tmp_path)
        with Terminal() as terminal:
            run.fit(PPO(), datamodule=data(4))
        assert set(re.findall(r"(\d+)%\|", terminal.text)) == {"0", "100"}

    def test_an_evaluation_does_not_break_it(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        callbacks = (Progress(refresh_seconds=0), EvaluationReport())
        with Terminal() as terminal:
            trainer(*callbacks, folder=tmp_path, validate_every=2).fit(PPO(), datamodule=data(4))
        text, printed = terminal.text, capsys.readouterr().out
        assert printed.count("evaluation after 256 steps") == 1
        assert printed.count("evaluation after 512 steps") == 1
        assert "|" not in printed
        # Cleared, printed, drawn again where it was.
        cleared = text.index("\r" + " " * 80)
        assert " 50%|" in text[:cleared]
        assert " 50%|" in text[cleared:]

    @pytest.mark.parametrize(
        ("hook", "exception"),
        [("on_train_batch_start", KeyboardInterrupt()), ("on_validation_start", RuntimeError("stop"))],
    )
    def test_an_exception_closes_it(self, tmp_path: Path, exception: BaseException, hook: str) -> None:
        bar = Progress(refresh_seconds=0)
        run = trainer(bar, Break(1, exception, hook), folder=tmp_path, validate_every=1)
        with Terminal() as terminal, pytest.raises((SystemExit, RuntimeError)):
            run.fit(PPO(), datamodule=data(4))
        assert not list(tqdm._instances)  # type: ignore[attr-defined]  # not in the stubs
        assert terminal.text.endswith("\n")

    def test_a_resumed_run_starts_where_it_stopped(self, tmp_path: Path) -> None:
        first = trainer(folder=tmp_path, enable_progress_bar=False, max_epochs=2)
        first.fit(PPO(), datamodule=data(4))
        first.save_checkpoint(tmp_path / "stopped.ckpt")
        second = trainer(Progress(refresh_seconds=0), folder=tmp_path)
        with Terminal() as terminal:
            second.fit(PPO(), datamodule=data(4), ckpt_path=tmp_path / "stopped.ckpt")
        assert re.findall(r"(\d+)/512 steps", terminal.text)[0] == "256"

    def test_no_thread_is_left_to_be_forked(self, tmp_path: Path) -> None:
        threads: list[int] = []
        if tqdm.monitor is not None:  # of a bar that another test drew
            tqdm.monitor.exit()
            tqdm.monitor = None

        class Count(Callback):
            def on_train_epoch_end(self, *_: Any) -> None:
                threads.append(sum("TMonitor" in type(thread).__name__ for thread in threading.enumerate()))

        with Terminal() as terminal:
            trainer(Progress(), Count(), folder=tmp_path).fit(PPO(), datamodule=data(2))
        assert "100%|" in terminal.text
        assert threads == [0, 0]


def test_disabled_shows_nothing_and_enabled_again_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bar = Progress()
    assert bar.is_enabled
    bar.disable()
    assert not bar.is_enabled
    trainer(bar, folder=tmp_path).fit(PPO(), datamodule=data(1))
    assert not lines(capsys.readouterr().err)
    bar.enable()
    trainer(bar, folder=tmp_path).fit(PPO(), datamodule=data(1))
    assert len(lines(capsys.readouterr().err)) == 1


def test_other_ranks_show_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bar = Progress()
    run = trainer(bar, folder=tmp_path)
    monkeypatch.setattr(type(run), "is_global_zero", False)
    run.fit(PPO(), datamodule=data(1))
    assert not bar.is_enabled


def test_print_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    Progress().print("a", 1, sep="-", end="!\n")
    assert capsys.readouterr().out == "a-1!\n"


def test_takes_the_place_of_lightnings_bar(tmp_path: Path) -> None:
    bar = Progress()
    assert trainer(bar, folder=tmp_path).progress_bar_callback is bar


def test_refuses_a_negative_time() -> None:
    with pytest.raises(ConfigurationError, match=r"refresh_seconds is -1"):
        Progress(refresh_seconds=-1)


def test_refuses_another_module(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"Progress works with PPO and RolloutDataModule"):
        trainer(Progress(), folder=tmp_path).fit(Other(), datamodule=data(1))
