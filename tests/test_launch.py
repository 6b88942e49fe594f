"""Ranks that fail, and the launcher that is told of it; all of them processes of their own."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from puffer_lightning.launch import END_SECONDS, launch
from tests.distributed.processes import free_port

ROOT = Path(__file__).parents[1]


def script(*lines: str) -> list[str]:
    """A rank that needs no imports, so that starting it takes no time."""
    return [
        sys.executable,
        "-S",
        "-c",
        "import os, sys, time; rank = int(os.environ['RANK'])\n" + "\n".join(lines),
    ]


class TestLaunch:
    """Of ranks that are told apart by their numbers and know nothing of each other."""

    def test_ranks_know_their_numbers(self, tmp_path: Path) -> None:
        command = script(
            f"open(f'{tmp_path}/{{rank}}', 'w').write(' '.join((os.environ[k] for k in ('LOCAL_RANK', 'A'))))"
        )
        assert launch(command, 2, {"A": "b"}, first_rank=4) == 0
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"4": "0 b", "5": "1 b"}

    @pytest.mark.parametrize("failing", [0, 1])
    def test_the_first_failure_ends_all(self, failing: int, capfd: pytest.CaptureFixture[str]) -> None:
        before = psutil.Process().children()
        assert launch(script(f"if rank == {failing}: sys.exit(3)", "time.sleep(1000)"), 2, {}) == 3
        assert psutil.Process().children() == before
        assert capfd.readouterr().err == "", "a rank that could speak has spoken"

    def test_of_a_killed_rank_it_speaks(self, capfd: pytest.CaptureFixture[str]) -> None:
        assert launch(script("if rank == 1: os.kill(os.getpid(), 9)", "time.sleep(1000)"), 2, {}) == 1
        assert capfd.readouterr().err == "error: rank 1 was killed by SIGKILL.\n"

    def test_a_rank_that_does_not_end_is_ended(self) -> None:
        stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
        before, began = psutil.Process().children(), time.monotonic()
        command = script(stubborn, "if rank == 0: time.sleep(1); sys.exit(1)", "time.sleep(1000)")
        assert launch(command, 2, {}) == 1
        assert time.monotonic() - began >= END_SECONDS
        assert psutil.Process().children() == before

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_signals_reach_each_rank_once(self, number: signal.Signals, tmp_path: Path) -> None:
        command = script(
            f"note = lambda *_: open(f'{tmp_path}/{{rank}}', 'a').write('!')",
            f"import signal; signal.signal({int(number)}, note)",
            f"open(f'{tmp_path}/up{{rank}}', 'w')",
            f"while not os.path.exists(f'{tmp_path}/{{rank}}'): time.sleep(0.01)",
            "time.sleep(0.5)",
        )
        launching = f"sys.exit(launch({command}, 2, {{}}))"
        with subprocess.Popen(
            [sys.executable, "-c", f"import sys; from puffer_lightning.launch import launch; {launching}"],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            start_new_session=True,
        ) as process:
            while len(list(tmp_path.glob("up*"))) < 2:
                assert process.poll() is None
                time.sleep(0.01)
            # As a terminal does, to all processes that were started from it.
            os.killpg(process.pid, number)
            assert process.wait(60) == 0
        assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["!", "!"]

    def test_those_that_a_signal_ends_have_as_long_as_they_need(self, tmp_path: Path) -> None:
        lines = [
            "import signal",
            f"signal.signal(signal.SIGTERM, lambda *_: open(f'{tmp_path}/told{{rank}}', 'w'))",
            f"open(f'{tmp_path}/up{{rank}}', 'w')",
            f"while not os.path.exists(f'{tmp_path}/told{{rank}}'): time.sleep(0.01)",
            # The one that ends first is no failure for which the other would be ended.
            "time.sleep(1.0 * rank)",
            f"open(f'{tmp_path}/saved{{rank}}', 'w')",
            "sys.exit(143)",
        ]
        assert self.signalled(tmp_path, lines, signal.SIGTERM) == 143
        assert {path.name for path in tmp_path.glob("saved*")} == {"saved0", "saved1"}

    def test_control_c_twice_ends_them(self, tmp_path: Path) -> None:
        ignored = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
        lines = [ignored, f"open(f'{tmp_path}/up{{rank}}', 'w')", "time.sleep(1000)"]
        assert self.signalled(tmp_path, lines, signal.SIGINT, signal.SIGINT) == 130

    def signalled(self, folder: Path, lines: list[str], *numbers: signal.Signals) -> int:
        """The exit code of a launcher that gets these signals once its ranks are up."""
        importing = "import sys; from puffer_lightning import launch; launch.END_SECONDS = 0.1"
        launching = f"{importing}; sys.exit(launch.launch({script(*lines)}, 2, {{}}))"
        with subprocess.Popen(
            [sys.executable, "-c", launching], env=os.environ | {"PYTHONPATH": str(ROOT)}
        ) as process:
            while len(list(folder.glob("up*"))) < 2:
                assert process.poll() is None
                time.sleep(0.01)
            for number in numbers:
                process.send_signal(number)
                time.sleep(0.2)
            return process.wait(60)


def start_two(launcher: str, folder: Path, fault: str, failing: int, seconds: float) -> subprocess.Popen[str]:
    """Two of ``tests.faulty_rank``, by our launcher, through memory, or by torchrun, through gloo."""
    through = "gloo" if launcher == "torchrun" else "memory"
    arguments = ["-m", "tests.faulty_rank", fault, str(failing), str(seconds), str(folder), through]
    if launcher == "torchrun":
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *arguments]
    else:
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        launching = f"sys.exit(launch([sys.executable, *{arguments}], 2, {environment}))"
        command = ["-c", f"import sys; from puffer_lightning.launch import launch; {launching}"]
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_two(
    launcher: str, folder: Path, fault: str, failing: int, seconds: float = 60.0
) -> subprocess.CompletedProcess[str]:
    with start_two(launcher, folder, fault, failing, seconds) as process:
        out, err = process.communicate(timeout=200)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def assert_none_left(folder: Path) -> None:
    pids = [int(path.name) for path in folder.iterdir()]
    assert len(pids) == 2
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


CASES = [("ours", 0), ("ours", 1), ("torchrun", 1)]


@pytest.mark.slow
class TestFaults:
    @pytest.mark.parametrize(("launcher", "failing"), CASES)
    def test_an_exception_is_printed_once(self, launcher: str, failing: int, tmp_path: Path) -> None:
        done = run_two(launcher, tmp_path, "raise", failing)
        assert done.returncode == 1
        assert done.stderr.count("ValueError: the pole broke") == 1
        assert f"Rank {failing} failed.\nTraceback" in done.stderr
        assert "lost its connection" not in done.stderr
        assert "gloo" not in done.stderr
        assert_none_left(tmp_path)

    def test_what_all_ranks_refuse_is_said_once(self, tmp_path: Path) -> None:
        done = run_two("ours", tmp_path, "refuse", -1)
        assert (done.returncode, done.stderr) == (2, "error: gamma is 2: set it to less.\n")
        assert_none_left(tmp_path)

    @pytest.mark.parametrize(("launcher", "failing"), CASES)
    def test_a_killed_rank_is_named(self, launcher: str, failing: int, tmp_path: Path) -> None:
        done = run_two(launcher, tmp_path, "kill", failing)
        assert done.returncode == 1
        if launcher == "ours":
            assert done.stderr == f"error: rank {failing} was killed by SIGKILL.\n"
        else:
            assert f"failed (exitcode: -9) local_rank: {failing}" in done.stderr
        assert "lost its connection" not in done.stderr
        assert_none_left(tmp_path)

    @pytest.mark.parametrize(("launcher", "failing"), CASES)
    def test_a_hanging_rank_is_named(self, launcher: str, failing: int, tmp_path: Path) -> None:
        done = run_two(launcher, tmp_path, "hang", failing, seconds=3.0)
        assert done.returncode == 1
        assert re.findall("error: (rank .+?),", done.stderr) == [
            f"rank {failing} did not answer within 3 seconds"
        ]
        assert_none_left(tmp_path)

    def test_so_is_one_that_cannot_even_tell_who_answers(self, tmp_path: Path) -> None:
        done = run_two("ours", tmp_path, "stop", 0, seconds=3.0)
        assert done.returncode == 1
        assert re.findall("error: (rank .+?),", done.stderr) == ["rank 0 did not answer within 3 seconds"]
        assert_none_left(tmp_path)

    def test_ranks_do_not_outlive_their_launcher(self, tmp_path: Path) -> None:
        with start_two("ours", tmp_path, "hang", -1, seconds=1000.0) as launcher:
            while len(list(tmp_path.iterdir())) < 2:
                assert launcher.poll() is None
                time.sleep(0.1)
            launcher.kill()
            launcher.communicate()
        end = time.monotonic() + 30
        while any(psutil.pid_exists(int(path.name)) for path in tmp_path.iterdir()):
            assert time.monotonic() < end
            time.sleep(0.1)
