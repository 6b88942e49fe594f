import contextlib
import os
import re
import signal
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from puffer_lightning.cli import main
from tests.commandline import QUICK, STEPS_PER_ITERATION, column, metrics, refused, run

METRICS = {
    "rollout/episode_return",
    "rollout/episode_length",
    "rollout/episodes",
    "train/policy_loss",
    "train/value_loss",
    "train/entropy",
    "train/approx_kl",
    "train/clip_fraction",
    "train/explained_variance",
    "train/learning_rate",
    "train/grad_norm",
    "train/skipped",
    "time/sps",
    "time/rollout_share",
    "time/update_share",
}
STEPS = [STEPS_PER_ITERATION * i for i in (1, 2, 3)]
PLATEAU = "torch.optim.lr_scheduler.ReduceLROnPlateau"
FACTORIES = """
import pathlib

import gymnasium as gym
from gymnasium.vector import AutoresetMode, SyncVectorEnv


class Poles(SyncVectorEnv):
    def __init__(self, num_envs, length=500):
        make = lambda: gym.make("CartPole-v1", max_episode_steps=length)
        super().__init__([make] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)

    def close_extras(self, **kwargs):
        super().close_extras(**kwargs)
        pathlib.Path("closed").touch()


def make(num_envs, length=500):
    return Poles(num_envs, length)


def one(num_envs):
    return gym.make("CartPole-v1")
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    Path("factories.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("factories", None)


def printed_config(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as exit_:
        main(["fit", *args, "--print_config"])
    assert exit_.value.code == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert isinstance(config, dict)
    return config


def checkpoint(path: str) -> dict[str, Any]:
    loaded = torch.load(path)
    assert isinstance(loaded, dict)
    return loaded


def command(*args: str) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", "puffer_lightning", *args]


class TestOptions:
    def test_the_command_line_wins_over_the_configuration(self, capsys: pytest.CaptureFixture[str]) -> None:
        Path("mine.yaml").write_text("data:\n  num_envs: 16\n  horizon: 64\n")
        options = ["--model.gamma", "0.98", "--data.num_envs=32", "--trainer.max_time", "00:00:10:00"]
        config = printed_config(capsys, "--config", "mine.yaml", *options)
        assert config["model"]["gamma"] == 0.98
        assert (config["data"]["num_envs"], config["data"]["horizon"]) == (32, 64)
        assert config["trainer"]["max_time"] == "00:00:10:00"

    def test_a_printed_configuration_is_one(self, capsys: pytest.CaptureFixture[str]) -> None:
        config = printed_config(capsys, "--config=ppo.yaml", "--model.gamma=0.9")
        Path("again.yaml").write_text(yaml.safe_dump(config))
        assert printed_config(capsys, "--config=again.yaml") == config

    @pytest.mark.parametrize("subcommand", ["fit", "validate", "test", "predict"])
    def test_help_explains_each_of_ours(self, subcommand: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as exit_:
            main([subcommand, "--help"])
        assert exit_.value.code == 0
        entries = re.split(r"^  (?=-)", capsys.readouterr().out, flags=re.MULTILINE)
        explained = {}
        for entry in entries:
            if option := re.match(r"--((?:data|model|checkpoint)\.\w+)[ \n]", entry):
                explained[option[1]] = entry[option.end() :].partition("(type:")[0]
        assert {"data.env", "data.num_envs", "model.gamma", "model.policy", "checkpoint.mode"} <= set(
            explained
        )
        for name, words in explained.items():
            sentence = re.sub(r"^(\S+|{.*?})\s", "", words).strip()
            assert sentence.count(" ") >= 2, f"{name} is not explained: {words}"
            assert sentence.endswith("."), words

    @pytest.mark.parametrize(
        ("subcommand", "option"), [("validate", "video"), ("test", "video"), ("predict", "output")]
    )
    def test_help_explains_what_a_subcommand_adds(
        self, subcommand: str, option: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit):
            main([subcommand, "--help"])
        assert re.search(rf"^  --{option} \w+ +[A-Z]\w+ .* to", capsys.readouterr().out, re.MULTILINE)


class TestFit:
    def test_trains_logs_saves_and_evaluates(self, capsys: pytest.CaptureFixture[str]) -> None:
        run("fit", "--trainer.check_val_every_n_epoch=2")
        rows = metrics()
        for name in METRICS:
            assert list(column(name)) == STEPS, name
        assert set().union(*rows) - METRICS - {"epoch", "step"} == {
            f"val/episode_{name}" for name in ("return", "return_std", "length", "length_std")
        }
        assert [row["step"] for row in rows if "train/entropy" in row] == [str(step) for step in STEPS]
        assert list(column("val/episode_return")) == [STEPS[1], STEPS[2]]
        out = capsys.readouterr().out
        assert re.findall(r"evaluation after (\d+) steps: 2 greedy episodes of CartPole-v1", out) == [
            "256",
            "384",
        ]
        folder = Path("lightning_logs/version_0")
        assert yaml.safe_load((folder / "config.yaml").read_text())["data"]["num_envs"] == 8
        for name in ("best", "last"):
            assert checkpoint(f"{folder}/checkpoints/{name}.ckpt")["ppo"]["env_steps"] in STEPS

    def test_resumes_and_the_command_line_wins(self) -> None:
        run("fit", "--checkpoint.dirpath=ck", "--trainer.max_epochs=2", "--model.gamma=0.9")
        run(
            "fit",
            "--ckpt_path=ck/last.ckpt",
            f"--data.total_timesteps={4 * STEPS_PER_ITERATION}",
            "--model.lr_schedule=constant",
            "--model.optimizer.lr=0.125",
        )
        assert column("train/learning_rate", version=1) == {
            3 * STEPS_PER_ITERATION: 0.125,
            4 * STEPS_PER_ITERATION: 0.125,
        }
        assert checkpoint("lightning_logs/version_1/checkpoints/last.ckpt")["ppo"]["env_steps"] == 512

    @pytest.mark.parametrize(
        ("options", "rates"),
        [
            (["--model.lr_schedule=linear"], [0.1, 0.1 * 2 / 3, 0.1 / 3]),
            (["--model.lr_schedule=cosine", "--model.warm_up_share=0.5"], [0.01, 0.07 * 0.75, 0.025]),
            (["--model.lr_schedule=StepLR", "--model.lr_schedule.step_size=1"], [0.1, 0.01, 0.001]),
        ],
    )
    def test_any_optimizer_and_schedule(self, options: list[str], rates: list[float]) -> None:
        run("fit", "--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=0.1", *options)
        assert list(column("train/learning_rate").values()) == pytest.approx(rates)

    def test_without_a_logger_or_checkpoints_writes_nothing(self) -> None:
        Path("config.yaml").write_text("mine")
        before = sorted(Path().iterdir())
        run("fit", "--trainer.logger=false", "--trainer.enable_checkpointing=false")
        assert [path for path in sorted(Path().iterdir()) if path.name != "__pycache__"] == before
        assert Path("config.yaml").read_text() == "mine"

    def test_can_log_to_tensorboard(self) -> None:
        run("fit", "--trainer.logger=TensorBoardLogger", "--trainer.logger.save_dir=tb")
        from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
            EventAccumulator,
        )

        [folder] = {file.parent for file in Path("tb").rglob("events.out.*")}
        events = EventAccumulator(str(folder)).Reload()
        assert [event.step for event in events.Scalars("train/entropy")] == STEPS
        assert [event.step for event in events.Scalars("val/episode_return")] == STEPS[2:]
        assert (folder / "config.yaml").is_file()

    @pytest.mark.parametrize("spelling", ["path", "class_path", "yaml"])
    def test_takes_environments_by_class_path(
        self, spelling: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        Path("env.yaml").write_text(
            "data:\n  env:\n    class_path: factories.make\n    init_args:\n      length: 4\n"
        )
        options = {
            "path": ["--data.env=factories.Poles", "--data.env_kwargs.length=7"],
            "class_path": ["--data.env.class_path=factories.Poles", "--data.env.init_args.length=7"],
            "yaml": ["--config=env.yaml", "--data.env.init_args.length=7"],
        }[spelling]
        run("fit", *options)
        out = capsys.readouterr().out
        assert re.search(r"episodes of factories\.\w+, return 7.00 ± 0.00, length 7.0 ± 0.0", out)


class TestEvaluation:
    def test_scores_and_films_a_checkpoint(self, capsys: pytest.CaptureFixture[str]) -> None:
        run("fit", "--checkpoint.dirpath=ck")
        capsys.readouterr()
        episodes = {"--ckpt_path=ck/last.ckpt", "--data.eval_episodes=5"}
        run("validate", *episodes, "--video=films")
        score = re.search(
            r"after 384 steps: 5 greedy episodes of CartPole-v1, return (.+) ± .+, length (.+) ± .+",
            capsys.readouterr().out,
        )
        assert score
        assert float(score[1]) == pytest.approx(float(score[2]), abs=0.06)
        [film] = Path("films").iterdir()
        assert film.suffix == ".mp4"
        assert film.stat().st_size > 1000
        run("test", *episodes)
        assert f"return {score[1]} ±" in capsys.readouterr().out

    def test_of_a_policy_that_is_not_trained(self, capsys: pytest.CaptureFixture[str]) -> None:
        run("validate")
        assert "evaluation after 0 steps" in capsys.readouterr().out

    def test_predict_writes_episodes(self, capsys: pytest.CaptureFixture[str]) -> None:
        run("predict", "--output=out/played.npz")
        assert "2 episodes" in capsys.readouterr().out
        played = np.load("out/played.npz", allow_pickle=False)
        steps = played["episode_lengths"].sum()
        assert played["episode_lengths"].shape == (2,)
        assert played["observations"].shape == (steps, 4)
        assert played["rewards"].sum() == played["episode_returns"].sum() == steps


class TestRefuses:
    """Before anything runs, in one sentence that names the option and the fix."""

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            ("--confg ppo.yaml", "there is no option --confg: did you mean --config?"),
            ("--model.gama 0.9", "there is no option --model.gama: did you mean --model.gamma?"),
            ("--config typo.yaml", "there is no option --data.nmu_envs: did you mean --data.num_envs?"),
            ("--config no.yaml", "--config no.yaml is neither a file nor a shipped configuration"),
            ("--config factories.py", "--config factories.py is not YAML"),
            ("--model.gamma x", "--model.gamma: Expected a float. Got value: x"),
            ("--model.gamma nan", "--model.gamma: Expected a float. Got value: nan"),
            ("--model.gamma 1.5", "gamma is 1.5: set it between 0 and 1"),
            ("--data.num_envs 0", "num_envs is 0: set it to"),
            ("--data.num_envs 1.5", "--data.num_envs: Expected a int. Got value: 1.5"),
            ("--data.eval_episodes 0", "eval_episodes is 0: set it to"),
            ("--data.env CartPol-v1", "env CartPol-v1 is not a registered gymnasium id: did you mean"),
            ("--data.env factories.one", "env factories.one made a TimeLimit: let it make a"),
            ("--data.env factories.non", "env factories.non is neither a gymnasium id nor something"),
            ("--data.env.length 3", "env is {'length': 3}: name it, or give it a class_path and init_args"),
            ("--data.wrappers+ FrameStackObservation", "FrameStackObservation needs stack_size"),
            ("--data.wrappers+ FrameStck", "--data.wrappers: Expected a dot import path string: FrameStck"),
            ("--data.env_kwargs.wind 1", "env_kwargs {'wind': 1} do not fit env CartPole-v1"),
            ("--model.num_minibatches 7", "num_minibatches 7 does not divide"),
            ("--model.optimizer Adm", "--model.optimizer: Expected a dot import path string: Adm"),
            ("--model.optimizer AdamW --model.optimizer.l 1", "torch.optim.AdamW has no option l; --model"),
            ("--model.policy MLPPolicy --model.policy.shared 3", "--model.policy.shared: Expected a bool"),
            ("--model.lr_schedule linaer", "--model.lr_schedule: Expected a Literal['constant', 'linear',"),
            ("--model.lr_schedule StepLR", "torch.optim.lr_scheduler.StepLR needs step_size."),
            (f"--model.lr_schedule {PLATEAU}", "lr_schedule ReduceLROnPlateau needs a metric: choose"),
            ("--trainer.gradient_clip_val 0.5", "set model.max_grad_norm 0.5"),
            ("--trainer.accumulate_grad_batches 2", "set model.accumulate_grad_batches 2"),
            ("--trainer.strategy deepspeed", "trainer.strategy deepspeed is left out on purpose"),
            ("--trainer.strategy ddpp", "invalid strategy name: `strategy='ddpp'`"),
            ("--trainer.logger.sav x", "lightning.pytorch.loggers.CSVLogger has no option sav; --trainer"),
            ("--trainer.callbacks Video --trainer.callbacks.fps 0", "error: fps is 0: set it to 1 or more."),
            ("--trainer.logger WandLogger", "--trainer.logger: Expected a dot import path string"),
            ("--checkpoint.mode up", "--checkpoint.mode: Expected a Literal['min', 'max']. Got value: up"),
            ("--checkpoint.every_n_iterations 0", "every_n_iterations is 0: set it to 1 or more"),
            ("--ckpt_path no.ckpt", "ckpt_path no.ckpt does not exist: give the path of a checkpoint"),
            ("--ckpt_path factories.py", "ckpt_path factories.py is not a checkpoint"),
            ("--ckpt_path arrays.npz", "ckpt_path arrays.npz is not a checkpoint"),
            ("--ckpt_path cut.ckpt", "ckpt_path cut.ckpt is not a checkpoint, or not a whole one"),
            ("--ckpt_path best", "ckpt_path best needs the run that wrote it: give the path"),
            ("--ckpt_path weights.pt", "ckpt_path weights.pt is not a checkpoint"),
        ],
    )  # fmt: skip
    def test_what_cannot_work(self, args: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
        Path("typo.yaml").write_text("data:\n  nmu_envs: 3\n")
        np.savez("arrays.npz", a=np.zeros(3))
        torch.save({"state_dict": {}}, "weights.pt")
        Path("cut.ckpt").write_bytes(Path("weights.pt").read_bytes()[:200])
        assert message in refused(capsys, "fit", *QUICK, *args.split())
        assert not list(Path().rglob("*.csv"))

    def test_an_unknown_subcommand(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "'fit', 'validate', 'test', 'predict'" in refused(capsys, "train")

    def test_the_checkpoint_of_another_policy(self, capsys: pytest.CaptureFixture[str]) -> None:
        run("fit", "--checkpoint.dirpath=ck")
        capsys.readouterr()
        message = refused(capsys, "test", *QUICK, "--ckpt_path=ck/last.ckpt", "--data.env=Acrobot-v1")
        assert "ckpt_path holds another policy" in message

    def test_an_output_that_is_no_npz(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "end in .npz" in refused(capsys, "predict", *QUICK, "--output=episodes.txt")

    @pytest.mark.parametrize(
        ("extra", "flags"),
        [
            ("wandb", {"lightning.pytorch.loggers.wandb._WANDB_AVAILABLE": "wandb"}),
            (
                "tensorboard",
                {
                    "lightning.fabric.loggers.tensorboard._TENSORBOARD_AVAILABLE": "tensorboard",
                    "lightning.fabric.loggers.tensorboard._TENSORBOARDX_AVAILABLE": "tensorboardX",
                },
            ),
        ],
    )
    def test_a_logger_that_is_not_installed(
        self,
        extra: str,
        flags: dict[str, str],
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        for flag, package in flags.items():
            monkeypatch.setattr(flag, Missing(package))
        logger = {"wandb": "WandbLogger", "tensorboard": "TensorBoardLogger"}[extra]
        options = ["--trainer.logger", logger, "--trainer.logger.save_dir=."]
        assert f'pip install "puffer-lightning[{extra}]"' in refused(capsys, "fit", *QUICK, *options)

    def test_films_without_imageio(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("puffer_lightning.callbacks.video.find_spec", lambda name: None)
        message = refused(capsys, "test", *QUICK, "--video=films")
        assert 'pip install "puffer-lightning[video]"' in message


class Missing:
    """What Lightning knows a package by that is not installed."""

    def __init__(self, package: str) -> None:
        self.package = package

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"Requirement '{self.package}' not met"


class TestProcess:
    """What only shows in a process of its own."""

    def test_a_user_error_exits_with_2(self) -> None:
        done = subprocess.run(
            command("fit", "--data.num_envs=0"), capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].startswith("error: num_envs is 0")
        assert "Traceback" not in done.stderr

    def test_control_c_leaves_a_checkpoint_to_resume_from(self) -> None:
        options = [
            "--checkpoint.dirpath=ck",
            "--checkpoint.every_n_iterations=5",
            "--data.env=factories.make",
        ]
        endless = command("fit", *QUICK, *options, "--data.total_timesteps=100_000_000")
        with subprocess.Popen(
            endless,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ
            | {"PYTHONPATH": f"{Path.cwd()}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"},
        ) as process:
            wait_until(lambda: Path("ck/last.ckpt").exists(), process)
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=60)[0]
        assert process.returncode == 130, said
        assert "Traceback" not in said
        assert "evaluation after" not in said
        assert "resume with ckpt_path" in said
        assert Path("closed").exists()
        done = checkpoint("ck/last.ckpt")["ppo"]["env_steps"]
        assert done % STEPS_PER_ITERATION == 0
        total = done + STEPS_PER_ITERATION
        run("fit", *options, f"--data.total_timesteps={total}", "--ckpt_path=ck/last.ckpt")
        assert checkpoint("ck/last.ckpt")["ppo"]["env_steps"] == total

    @pytest.mark.slow
    def test_can_log_to_wandb_offline(self) -> None:
        options = ["--trainer.logger=WandbLogger", "--trainer.logger.offline=true"]
        key = b"0123456789abcdef" * 3
        with subprocess.Popen(
            command("fit", *QUICK, *options),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"WANDB_MODE": "offline", "WANDB_API_KEY": key.decode(), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        ) as process:
            said = process.communicate(timeout=120)[0]
        assert process.returncode == 0, said
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
        [file] = Path("wandb").glob("offline-run-*/*.wandb")
        history = list(wandb_history(file))
        assert [row["trainer/global_step"] for row in history if "train/entropy" in row] == STEPS
        assert [row["trainer/global_step"] for row in history if "val/episode_return" in row] == STEPS[2:]
        assert not Path("config.yaml").exists()
        written = [path for path in Path().rglob("*") if path.is_file()]
        assert {"last.ckpt", "debug.log", file.name} <= {path.name for path in written}
        assert not [path for path in written if key in path.read_bytes()]
        assert key not in said

    @pytest.mark.slow
    def test_a_wheel_ships_the_configurations(self, tmp_path: Path) -> None:
        source = Path(__file__).parents[1]
        build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)]
        subprocess.run([*build, str(source)], check=True, capture_output=True)
        [wheel] = tmp_path.glob("*.whl")
        shipped = {path.name for path in (source / "configs").glob("*.yaml")}
        with zipfile.ZipFile(wheel) as contents:
            names = contents.namelist()
            assert {f"puffer_lightning/configs/{name}" for name in shipped} <= set(names)
            assert "puffer_lightning/py.typed" in names
            assert not [name for name in names if name.startswith("tests")]
            contents.extractall(tmp_path / "installed")
        script = (
            "from puffer_lightning import cli, shipped; print('#', shipped.shipped_configs());"
            "cli.main(['fit', '--config=ppo.yaml', '--print_config'])"
        )
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script],
            env=os.environ | {"PYTHONPATH": str(tmp_path / "installed")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"# {tmp_path / 'installed' / 'puffer_lightning' / 'configs'}\n")
        assert yaml.safe_load(done.stdout)["data"]["num_envs"] == 128


def wait_until(condition: Any, process: subprocess.Popen[str], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            raise AssertionError(f"waited in vain: {process.communicate()[0]}")
        time.sleep(0.05)


def wandb_history(path: Path) -> Iterator[dict[str, float]]:
    """The rows of a run's file: after 7 bytes, records in LevelDB's log format, in blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            parsed = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
            parsed.ParseFromString(record)
            record = b""
            if parsed.WhichOneof("record_type") == "history":
                yield {
                    item.key or "/".join(item.nested_key): float(item.value_json)
                    for item in parsed.history.item
                }
