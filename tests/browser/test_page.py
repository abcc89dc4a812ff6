"""Pages in a real browser: drawn, quiet, safe, and readable on a phone, in the dark and on paper."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from evenstep.predict.calibration import calibrate
from evenstep.predict.communication_cost import parse_link
from evenstep.predict.forecast import Forecaster, Question
from evenstep.report.html.forecast_page import write_forecast_page
from evenstep.report.html.page import page_of_runs, write_page
from evenstep.report.prediction import FOLDER
from evenstep.tune.study_page import write_study_page
from tests.browser import examples
from tests.browser.conftest import Seen, Visit
from tests.marks import first_is_quick
from tests.pure.test_predict import measured_record

if TYPE_CHECKING:
    from playwright.sync_api import Page

AXIS_COLOUR = """() => Bokeh.documents.flatMap((doc) => [...doc.all_models])
    .find((model) => model.type === 'LinearAxis').major_label_text_color"""


def canvases(page: Page, inside: str = ".chart:visible") -> list[dict[str, float]]:
    """The sizes of the canvases that can be seen."""
    found = [canvas.bounding_box() for canvas in page.locator(f"{inside} canvas").all()]
    return [dict(box) for box in found if box is not None]


def is_drawn(page: Page, inside: str = ".chart:visible") -> bool:
    return bool(canvases(page, inside)) and all(
        box["width"] > 150 and box["height"] > 60 for box in canvases(page, inside)
    )


def widest(page: Page) -> int:
    """How far the page reaches to the side."""
    return int(page.evaluate("document.documentElement.scrollWidth"))


def visible_renderers(seen: Seen, name: str) -> list[bool]:
    return list(
        seen.page.evaluate(
            """(name) => Bokeh.documents.flatMap((doc) => [...doc.all_models])
                .filter((model) => model.name === name && "visible" in model).map((model) => model.visible)""",
            name,
        )
    )


def test_a_page_draws_its_charts_without_a_complaint_or_a_request(seen_compared: Seen, compared: Path) -> None:
    check_drawn(seen_compared, compared)


def test_a_page_of_runs_draws_its_charts_without_a_complaint_or_a_request(ran: Path, visit: Visit) -> None:
    check_drawn(visit(ran), ran)


def check_drawn(seen: Seen, path: Path) -> None:
    assert is_drawn(seen.page)
    assert len(canvases(seen.page)) >= 7
    assert seen.requests == [path.as_uri()]
    assert seen.complaints == []


def test_a_prediction_draws_its_curves_apart_from_what_was_measured(tmp_path: Path, visit: Visit) -> None:
    calibration = calibrate([measured_record("single", 1, 0.010), measured_record("ddp", 2, 0.006)])
    question = Question(devices=[2, 8, 64], links=[parse_link("25gbit")], strategies=["ddp", "fsdp"], per_device=64)
    path = write_forecast_page(Forecaster(calibration, question, task="mine").forecast(), tmp_path)
    seen = visit(path)
    assert is_drawn(seen.page)
    assert seen.page.get_by_text("predicted", exact=True).count() == 6
    assert seen.page.get_by_text("measured", exact=True).count() == 2
    assert seen.requests == [path.as_uri()]
    assert seen.complaints == []


def test_a_comparison_shows_what_was_predicted_from_it_beside_what_was_measured(tmp_path: Path, visit: Visit) -> None:
    made = examples.comparison(tmp_path)
    before = num_charts(write_page(made, tmp_path))
    calibration = calibrate([measured_record("single", 1, 0.010), measured_record("ddp", 2, 0.006)])
    question = Question(devices=[8, 64], links=[parse_link("25gbit")], per_device=64)
    (tmp_path / FOLDER).mkdir()
    Forecaster(calibration, question, task="mine").forecast().write(tmp_path / FOLDER)
    path = write_page(made, tmp_path)
    seen = visit(path)
    assert seen.page.get_by_role("heading", name="Efficiency, predicted").count() == 1
    assert seen.page.get_by_text("Measured and predicted").count() == 1
    assert is_drawn(seen.page)
    assert seen.page.locator(".chart").count() == num_charts(path) > before
    assert seen.complaints == []


def num_charts(path: Path) -> int:
    return len(re.findall(r'class="[^"]*\bchart\b', path.read_text()))


def test_tabs_show_the_step_of_each_strategy_by_mouse_and_by_keyboard(seen_compared: Seen) -> None:
    seen = seen_compared
    for name in ("dp x 2", "ddp x 2", "fsdp x 2", "single"):
        seen.page.get_by_role("tab", name=name, exact=True).click()
        panel = seen.page.get_by_role("tabpanel", name=name, exact=True)
        panel.locator("canvas").first.wait_for()
        assert seen.page.get_by_role("tabpanel").count() == 1
        assert is_drawn(seen.page, ".panel:visible")
    seen.page.keyboard.press("ArrowRight")
    assert seen.page.get_by_role("tab", name="dp x 2", exact=True).get_attribute("aria-selected") == "true"
    seen.page.keyboard.press("ArrowLeft")
    assert seen.complaints == []


def test_a_click_on_a_legend_takes_its_line_away_and_another_brings_it_back(seen_compared: Seen) -> None:
    seen = seen_compared
    button = seen.page.locator("button[data-chart=loss]").first
    for is_on in (False, True):
        button.click()
        assert button.get_attribute("aria-pressed") == str(is_on).lower()
        assert set(visible_renderers(seen, "run 0")) == {is_on}
    assert seen.complaints == []


def test_names_with_scripts_in_them_are_shown_and_do_not_run(tmp_path: Path, visit: Visit) -> None:
    nasty = examples.comparison(tmp_path, task=examples.NASTY, why=examples.NASTY)
    row = replace(nasty.rows[2], strategy=examples.NASTY, peak_bytes={examples.NASTY: 1 << 28})
    seen = visit(write_page(replace(nasty, rows=[*nasty.rows, row]), tmp_path), width=375)
    _hover_everywhere(seen.page)
    assert seen.page.evaluate("window.ran") is None
    assert examples.NASTY[:40] in seen.page.locator("h1").inner_text()
    assert len(seen.requests) == 1
    assert widest(seen.page) == 375
    assert seen.complaints == []


def test_what_a_hover_shows_is_text(tmp_path: Path, visit: Visit) -> None:
    path = tmp_path / "page.html"
    nasty = examples.record("single", 1)
    nasty.plan = replace(nasty.plan, name="<img src=x onerror=window.ran=1>")
    path.write_text(page_of_runs([nasty]))
    seen = visit(path)
    bar = seen.page.locator("#chart-speed canvas").first
    box = bar.bounding_box()
    assert box is not None
    # Down the middle: the line is met somewhere.
    for part in range(1, 40):
        seen.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] * part / 40)
    seen.page.get_by_text("<img src=x").first.wait_for()
    assert seen.page.locator("img").count() == 0
    assert seen.page.evaluate("window.ran") is None
    assert seen.complaints == []


def _hover_everywhere(page: Page) -> None:
    for chart in page.locator(".chart:visible").all():
        chart.scroll_into_view_if_needed()
        box = chart.bounding_box()
        assert box is not None
        for part in (0.3, 0.5, 0.7):
            page.mouse.move(box["x"] + box["width"] * part, box["y"] + box["height"] * part)


@pytest.mark.parametrize("kind", first_is_quick(["compared", "ran"]))
def test_a_phone_scrolls_down_and_never_sideways(kind: str, request: pytest.FixtureRequest, visit: Visit) -> None:
    seen = visit(request.getfixturevalue(kind), width=375, has_touch=True, is_mobile=True)
    assert widest(seen.page) == 375
    assert is_drawn(seen.page)
    tables = seen.page.locator(".scroll").first
    assert tables.evaluate("(table) => table.scrollWidth > table.clientWidth")


def test_dark_and_light_follow_the_browser_even_while_the_page_is_open(compared: Path, visit: Visit) -> None:
    seen = visit(compared, color_scheme="dark")
    dark = (seen.page.evaluate("getComputedStyle(document.body).backgroundColor"), seen.page.evaluate(AXIS_COLOUR))
    seen.page.emulate_media(color_scheme="light")
    seen.page.wait_for_function(f"(colour) => ({AXIS_COLOUR})() !== colour", arg=dark[1])
    light = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (dark[0], light) == ("rgb(15, 18, 22)", "rgb(255, 255, 255)")
    assert seen.complaints == []


def test_a_page_prints(seen_compared: Seen) -> None:
    printed = seen_compared.page.pdf(format="A4")
    assert printed.startswith(b"%PDF")
    assert len(printed) > 50_000


def test_without_javascript_the_tables_say_it_all(compared: Path, visit: Visit) -> None:
    seen = visit(compared, java_script_enabled=False)
    text = seen.page.locator("main").inner_text()
    for words in ("Charts need JavaScript", "10,756", "1.70 x", "212 MiB", "✓ same", "evenstep compare digits"):
        assert words in text


def test_the_page_of_a_study_draws_its_charts_and_links_its_trials(tmp_path: Path, visit: Visit) -> None:
    pytest.importorskip("optuna")
    study = examples.study(tmp_path)
    seen = visit(write_study_page(study, tmp_path))
    assert is_drawn(seen.page)
    assert seen.complaints == []
    names = ("history", "progress", "coordinates", "importance", "steps")
    assert [chart.get_attribute("data-chart") for chart in seen.page.locator(".chart").all()] == list(names)
    assert seen.page.locator("#runs a").count() == 1
    seen.page.locator("#runs a").first.click()
    seen.page.wait_for_selector("body[data-drawn]")
    assert "0001" in seen.page.locator(".about").inner_text()
    assert seen.page.evaluate("window.ran") is None
