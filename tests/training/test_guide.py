"""The guide's code runs and prints what the guide says."""

import contextlib
import io
import re
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs" / "training.md"


def test_the_guide_prints_what_it_says() -> None:
    blocks = re.findall(r"```(python)?\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    printed, said = io.StringIO(), ""
    scope: dict[str, object] = {"__name__": "guide"}
    for language, text in blocks:
        if language:
            with contextlib.redirect_stdout(printed):
                exec(compile(text, str(GUIDE), "exec"), scope)
        else:
            said += text
    assert said
    assert printed.getvalue() == said
