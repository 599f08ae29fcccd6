"""The guide's code runs and prints what the guide says; its recipe is a valid one."""

import contextlib
import io
import re
import tomllib
from pathlib import Path

from adaptsfl.config import DataConfig, parse
from adaptsfl.data.datasets import NAMES

GUIDE = Path(__file__).parents[2] / "docs" / "data.md"


def test_the_guide_prints_what_it_says(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```(\w*)\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    printed, said = io.StringIO(), ""
    scope: dict[str, object] = {"__name__": "guide"}
    for language, text in blocks:
        if language == "python":
            with contextlib.redirect_stdout(printed):
                exec(compile(text, str(GUIDE), "exec"), scope)
        elif not language:
            said += text
        if "def squares" in text:
            (tmp_path / "guide_data.py").write_text(text)
    assert said
    assert printed.getvalue() == said
    prepare = scope["prepare"]
    ready = prepare(DataConfig(name="guide_data:squares", options={"count": 60}), devices=3, batch_size=4)  # type: ignore[operator]
    assert ready.batches.at(0).inputs.shape == (12, 2)


def test_the_guide_has_every_key_and_every_dataset() -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    parse(DataConfig, tomllib.loads(example)["data"])
    text = GUIDE.read_text()
    keys = {*DataConfig.model_fields, *DataConfig.model_fields["partition"].default.__class__.model_fields}
    for name in (*keys - {"partition"}, *NAMES):
        assert f"`{name}`" in text or re.search(rf"^{name} = ", example, flags=re.MULTILINE), name
