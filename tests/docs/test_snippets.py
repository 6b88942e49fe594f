import sys
from pathlib import Path

import pytest
import yaml

from puffer_lightning.cli import main
from tests.docs.documents import DOCUMENTS, Block, blocks

BLOCKS = [block for document in DOCUMENTS for block in blocks(document) if block.file is None]


@pytest.fixture
def _beside_its_files(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working directory of a user who saved the document's files."""
    for file in blocks(request.getfixturevalue("block").document):
        if file.file is not None:
            (tmp_path / file.file).write_text(file.text, encoding="utf-8")
            monkeypatch.delitem(sys.modules, Path(file.file).stem, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def of(language: str) -> list[Block]:
    found = [block for block in BLOCKS if block.language == language]
    assert found, f"no {language} block is marked to run"
    return found


@pytest.mark.usefixtures("_beside_its_files")
@pytest.mark.parametrize("block", of("python"), ids=str)
def test_python_runs(block: Block) -> None:
    code = "\n" * block.line + block.text
    exec(compile(code, str(block.document), "exec"), {"__name__": "__main__"})


@pytest.mark.usefixtures("_beside_its_files")
@pytest.mark.parametrize("block", of("yaml"), ids=str)
def test_yaml_is_a_configuration(
    block: Block, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("config.yaml").write_text(block.text, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["puffer_lightning"])
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", "config.yaml", "--print_config"])
    printed = capsys.readouterr()
    assert ended.value.code in (0, None), printed.err
    assert contains(yaml.safe_load(printed.out), yaml.safe_load(block.text)), printed.out


def contains(whole: object, part: object) -> bool:
    """Whether all that the part says is in the whole."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(contains(whole.get(key), part[key]) for key in part)
    if isinstance(part, list):
        return isinstance(whole, list) and all(map(contains, whole, part))
    return whole == part
