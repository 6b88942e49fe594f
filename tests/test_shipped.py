from pathlib import Path

import pytest

from puffer_lightning.errors import ConfigurationError
from puffer_lightning.shipped import find_configs, shipped_configs


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_of_the_working_directory_come_first() -> None:
    shipped = str(shipped_configs() / "ppo.yaml")
    assert find_configs(["fit", "--config", "ppo.yaml"]) == ["fit", "--config", shipped]
    Path("ppo.yaml").write_text("data:\n  num_envs: 3\n")
    assert find_configs(["fit", "--config", "ppo.yaml"]) == ["fit", "--config", "ppo.yaml"]


@pytest.mark.parametrize("args", [["--config=ppo.yaml"], ["-c", "ppo.yaml"], ["-c=ppo.yaml"]])
def test_in_each_spelling(args: list[str]) -> None:
    assert find_configs(args)[-1].endswith(str(shipped_configs() / "ppo.yaml"))


def test_other_arguments_stay() -> None:
    assert find_configs(["fit", "ppo.yaml", "--data.env", "a"]) == ["fit", "ppo.yaml", "--data.env", "a"]


def test_that_are_not_there() -> None:
    with pytest.raises(ConfigurationError, match=r"--config no\.yaml is neither.*acrobot\.yaml.*ppo\.yaml"):
        find_configs(["--config", "no.yaml"])


@pytest.mark.parametrize("text", [b"a: b: c", b"- 1", b"", b"\xff\xfe\x00"])
def test_that_are_no_configuration(text: bytes) -> None:
    Path("mine.yaml").write_bytes(text)
    with pytest.raises(ConfigurationError, match=r"--config mine\.yaml is not YAML of options"):
        find_configs(["--config", "mine.yaml"])
