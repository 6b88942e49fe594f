from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from puffer_lightning.callbacks import EvaluationReport, Video, video
from puffer_lightning.errors import ConfigurationError
from tests.callbacks.runs import PPO, Other, data, trainer

imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")

LENGTH = 4


class Lamp(gym.Env[Any, Any]):
    """Is as bright as the steps made; episodes take ``LENGTH``."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, height: int = 16, width: int = 16, render_mode: str | None = None) -> None:
        self.size = height, width
        self.render_mode = render_mode
        self.steps = 0

    def observe(self) -> Any:
        return np.full(1, self.steps / LENGTH, dtype=np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.observe(), 1.0, self.steps == LENGTH, False, {}

    def render(self) -> Any:
        return np.full((*self.size, 3), 20 + 50 * self.steps, dtype=np.uint8) if self.render_mode else None


class Dark(Lamp):
    def render(self) -> Any:
        return None


class Broken(Lamp):
    def render(self) -> Any:
        raise OSError("no display")


gym.register("tests/Broken-v0", f"{__name__}:Broken")
gym.register("tests/Lamp-v0", f"{__name__}:Lamp")


def lamps(num_envs: int, mode: AutoresetMode, kind: type[Lamp] = Lamp) -> VectorEnv:
    return SyncVectorEnv([partial(kind, render_mode="rgb_array")] * num_envs, autoreset_mode=mode)


def watch(path: Path) -> tuple[dict[str, Any], list[int]]:
    """What the file says of itself, and the brightness of each frame."""
    reader = imageio_ffmpeg.read_frames(str(path))
    about = next(reader)
    return about, [round(float(np.frombuffer(frame, dtype=np.uint8).mean())) for frame in reader]


def film(folder: Path, env: Any = "tests/Lamp-v0", env_kwargs: Any = None, **options: Any) -> Path:
    """The one film of a test of an untrained policy."""
    run = trainer(Video(str(folder / "films"), **options), folder=folder)
    run.test(PPO(), datamodule=data(env=env, env_kwargs=env_kwargs), verbose=False)
    (path,) = (folder / "films").iterdir()
    return path


def close_to(*brightness: int) -> Any:
    """Up to what the encoding loses."""
    return pytest.approx(brightness, abs=4)


@pytest.mark.parametrize("format", ["mp4", "gif"])
def test_films_an_episode_from_its_start_to_its_end_and_no_further(tmp_path: Path, format: str) -> None:
    about, brightness = watch(film(tmp_path, format=format))
    assert brightness == close_to(20, 70, 120, 170)
    assert about["fps"] == 10
    assert about["codec"].startswith({"mp4": "h264", "gif": "gif"}[format])


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_every_autoreset_mode_ends_in_time(tmp_path: Path, mode: AutoresetMode) -> None:
    # Only where the reset is a step of its own is the state that the episode ended in to be seen.
    last = (220,) if mode is AutoresetMode.NEXT_STEP else ()
    _, brightness = watch(film(tmp_path, env=partial(lamps, mode=mode)))
    assert brightness == close_to(20, 70, 120, 170, *last)


@pytest.mark.parametrize("format", ["mp4", "gif"])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (3, 5), (8, 16), (129, 131), (300, 2)])
def test_all_sizes_can_be_filmed(tmp_path: Path, format: str, height: int, width: int) -> None:
    about, brightness = watch(film(tmp_path, env_kwargs={"height": height, "width": width}, format=format))
    assert len(brightness) == LENGTH
    shown_width, shown_height = about["size"]
    assert max(shown_width, shown_height) >= 128
    assert shown_width / shown_height == pytest.approx(width / height, rel=0.02)
    if format == "mp4":
        assert shown_width % 2 == shown_height % 2 == 0


def test_frames_a_second_can_be_chosen(tmp_path: Path) -> None:
    assert watch(film(tmp_path, fps=5))[0]["fps"] == 5


def test_a_film_each_validation_but_none_of_the_sanity_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trainer(
        Video(str(tmp_path / "a" / "b"), episodes=2),
        folder=tmp_path,
        validate_every=2,
        num_sanity_val_steps=1,
    )
    run.fit(PPO(), datamodule=data(4, env="tests/Lamp-v0"))
    names = {path.name for path in (tmp_path / "a" / "b").iterdir()}
    assert names == {f"tests-Lamp-v0-steps-{steps}-episode-{i}.mp4" for steps in (256, 512) for i in (0, 1)}
    assert "an episode of return 4.00 filmed in" in capsys.readouterr().out


def test_filming_leaves_the_training_as_it_is(tmp_path: Path) -> None:
    trained = []
    for callbacks in ([], [Video(str(tmp_path))]):
        model = PPO()
        trainer(*callbacks, folder=tmp_path, validate_every=1).fit(
            model, datamodule=data(2, env="tests/Lamp-v0")
        )
        trained.append(torch.nn.utils.parameters_to_vector(model.policy.parameters()))
    assert list(tmp_path.glob("*.mp4"))
    assert torch.equal(*trained)


def test_the_same_policy_makes_the_same_film(tmp_path: Path) -> None:
    pytest.importorskip("pygame")
    films = [film(tmp_path / name, env="CartPole-v1").read_bytes() for name in "ab"]
    assert films[0] == films[1]


def test_other_ranks_film_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer(Video(str(tmp_path / "films")), EvaluationReport(), folder=tmp_path)
    monkeypatch.setattr(type(run), "is_global_zero", False)
    run.test(PPO(), datamodule=data(env="tests/Lamp-v0"), verbose=False)
    assert not (tmp_path / "films").exists()


def refused(tmp_path: Path, env: Any, match: str) -> None:
    """Before anything runs."""
    model = PPO()
    with pytest.raises(ConfigurationError, match=match):
        trainer(Video(str(tmp_path)), folder=tmp_path).fit(model, datamodule=data(env=env))
    assert not hasattr(model, "policy")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video, "find_spec", lambda name: None)
    refused(tmp_path, "tests/Lamp-v0", r'pip install "puffer-lightning\[video\]"')


@pytest.mark.parametrize(
    "env",
    ["puffer/Bandit-v0", partial(lamps, mode=AutoresetMode.SAME_STEP, kind=Dark)],
    ids=["id", "factory"],
)
def test_an_environment_without_frames_is_refused(tmp_path: Path, env: Any) -> None:
    refused(tmp_path, env, r"Video needs .* render_mode .* env (puffer/Bandit-v0|lamps) draws no frames")


def test_what_a_drawing_library_complains_about_is_told(tmp_path: Path) -> None:
    refused(tmp_path, "tests/Broken-v0", r"env tests/Broken-v0 draws no frames \(no display\): leave the")


def test_a_sharded_policy_is_refused(tmp_path: Path) -> None:
    model, source = PPO(), data(env="tests/Lamp-v0")
    model.build(source)
    next(model.policy.parameters()).full_tensor = None  # type: ignore[attr-defined]  # as a DTensor has it
    with pytest.raises(ConfigurationError, match=r"sharded over ranks"):
        trainer(Video(str(tmp_path)), folder=tmp_path).test(model, datamodule=source)


@pytest.mark.parametrize("option", [{"episodes": 0}, {"format": "avi"}, {"fps": 0}])
def test_refuses_options_out_of_range(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"{next(iter(option))} is {next(iter(option.values()))}"):
        Video(**option)


def test_refuses_another_module(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"Video works with PPO and RolloutDataModule"):
        trainer(Video(str(tmp_path)), folder=tmp_path).test(Other(), datamodule=data())
