from pathlib import Path
from typing import Any

import pytest

from puffer_lightning.credentials import refuse_credentials
from puffer_lightning.errors import ConfigurationError
from tests.commandline import QUICK, refused

KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    "name", ["api_key", "WANDB_API_KEY", "apikey", "password", "access_token", "client_secret"]
)
def test_are_named_without_their_values(name: str) -> None:
    options = {"trainer": {"logger": [{}, {"dict_kwargs": {"settings": {name: KEY}}}]}}
    with pytest.raises(
        ConfigurationError, match=rf"^trainer\.logger\.1\.dict_kwargs\.settings\.{name} would"
    ) as error:
        refuse_credentials(options)
    assert KEY not in str(error.value)


@pytest.mark.parametrize(
    "options", [{"max_tokens": 3}, {"token": None}, {"a": ["token"]}, {"api_key_file": "k"}]
)
def test_other_options_pass(options: Any) -> None:
    refuse_credentials(options)


def test_a_key_among_the_options_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    loggers = '[{"class_path": "CSVLogger", "init_args": {"save_dir": "."}}, {"class_path": "WandbLogger", '
    loggers += f'"dict_kwargs": {{"settings": {{"api_key": "{KEY}"}}}}}}]'
    message = refused(capsys, "fit", *QUICK, f"--trainer.logger={loggers}")
    assert message.startswith("error: trainer.logger.1.init_args.settings.api_key would be saved")
    assert not list(tmp_path.iterdir())
