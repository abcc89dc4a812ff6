"""The README's pictures: EVENSTEP_PICTURES=1 measures the digits and takes them; or name a comparison's folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from evenstep.report.comparison import Comparison
from evenstep.report.html.page import write_page
from tests.browser.conftest import Visit

ASKED = os.environ.get("EVENSTEP_PICTURES", "")
PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
MOST_BYTES = 200_000


def compared(asked: str) -> Path:
    """The folder of a comparison: the one that was named, or one that is measured now."""
    if Path(asked).is_dir():
        return Path(asked)
    subprocess.run([sys.executable, "-m", "evenstep", "compare", "digits", "--devices", "1,2"], check=True)
    return next(path.parent for path in Path("runs").glob("*/comparison.json"))


@pytest.mark.skipif(not ASKED, reason="pictures are taken when asked for: EVENSTEP_PICTURES=1")
@pytest.mark.timeout(900)
def test_takes_the_pictures_of_the_readme(tmp_path: Path, visit: Visit) -> None:
    PICTURES.mkdir(exist_ok=True)
    folder = compared(ASKED)
    page = write_page(Comparison.read(folder), folder, tmp_path / "page.html")
    for scheme in ("light", "dark"):
        seen = visit(page, width=1200, color_scheme=scheme)
        seen.page.set_viewport_size({"width": 1200, "height": 1150})
        # The charts follow the size of the page a moment later.
        seen.page.wait_for_timeout(500)
        seen.page.get_by_role("tab", name="ddp x 2", exact=True).click()
        seen.page.wait_for_timeout(500)
        seen.page.locator(".timelines").screenshot(path=PICTURES / f"timeline-{scheme}.png")
        assert seen.complaints == []
    for picture in PICTURES.glob("*.png"):
        assert picture.stat().st_size < MOST_BYTES
