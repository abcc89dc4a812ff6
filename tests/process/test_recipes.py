"""Every recipe of docs/recipes.md trains as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
RECIPES = {
    title.strip(): blocks
    for title, text in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    if (blocks := re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
}
QUICK = ("Your ", "A loss over the whole batch")


@pytest.mark.slow
def test_verify_follows_what_is_changed_between_steps() -> None:
    (source,) = RECIPES["A mean teacher: a second model that follows the first"]
    Path("teacher.py").write_text(source)
    verify = ["verify", "teacher.py", "--strategies", "ddp", "--devices", "cpu,cpu"]
    done = subprocess.run([sys.executable, "-m", "evenstep", *verify], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "title",
    [pytest.param(title, marks=() if title.startswith(QUICK) else pytest.mark.slow) for title in RECIPES],
)
def test_a_recipe_trains_on_two_devices(title: str) -> None:
    for number, source in enumerate(RECIPES[title]):
        Path(f"recipe_{number}.py").write_text(source)
        train = ["train", f"recipe_{number}.py", "--strategy", "ddp", "--steps", "3", "--devices", "cpu,cpu"]
        # A custom loop is a script.
        command = ["run", "--devices", "2", f"recipe_{number}.py"] if "evenstep.join(" in source else train
        run = [sys.executable, "-m", "evenstep", *command]
        done = subprocess.run(run, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        if "evenstep.adopt." in source:
            adopt = [sys.executable, "-m", "evenstep", "adopt", f"recipe_{number}.py", "--steps", "3"]
            compared = subprocess.run(adopt, capture_output=True, text=True, timeout=120)
            assert compared.stdout.endswith("bit for bit\n"), compared.stdout + compared.stderr
