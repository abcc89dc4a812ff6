"""A page as HTML: no network, no JavaScript but bokeh's and our own, everything escaped."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import evenstep
from evenstep.errors import BadInput
from evenstep.report.comparison import Comparison
from evenstep.report.progress import without_control
from evenstep.report.sheets import ComparedRow, Sheet
from evenstep.report.words import OF_RUNS

if TYPE_CHECKING:
    from jinja2 import Environment

    from evenstep.report.look import Chart

HERE = Path(__file__).parent
NEEDS_BOKEH = "a page needs bokeh, which is not installed; pip install 'evenstep[page]'"


@dataclass(frozen=True, kw_only=True)
class Page:
    """All that the template says."""

    title: str
    about: str
    commands: Sequence[str]
    charts: Sequence[Chart]
    comparison: Comparison | None = None
    compared: Sequence[ComparedRow] = ()
    runs: Sheet | None = None
    numbers: Mapping[str, Sheet] = field(default_factory=dict)
    """Sheets that hold the numbers of a chart, by its name."""
    sheets: Sequence[Sheet] = ()
    notes: Sequence[str] = ()
    words: Mapping[str, str] = field(default_factory=lambda: OF_RUNS)
    status: str = ""
    shape: str = ""
    """Of a live page: which charts, lines and tables it has. When that changes, the page is loaded again."""

    @property
    def timelines(self) -> list[Chart]:
        """Those that share one place."""
        return [chart for chart in self.charts if chart.tab]


def need_bokeh() -> None:
    """Say what to install where it is missing."""
    if find_spec("bokeh") is None:
        raise BadInput(NEEDS_BOKEH)


def render(page: Page) -> str:
    """The page as text; its policy allows the two scripts in it, by their hashes, and nothing else."""
    scripts = [bokeh_script(), _own("page.js")]
    sources = " ".join(f"'sha256-{_hash(script)}'" for script in scripts)
    connect = "connect-src 'self'; " if page.shape else ""
    policy = (
        f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; img-src data:; {connect}"
        "base-uri 'none'; form-action 'none'"
    )
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            page=page,
            policy=policy,
            style=_own("page.css"),
            scripts=scripts,
            items=_data({chart.name: item(chart) for chart in page.charts}),
            version=evenstep.__version__,
        )
    )


def item(chart: Chart) -> dict[str, Any]:
    """A chart as bokeh's own JSON, in the words that its `embed_item` reads; made without its many checks."""
    import bokeh
    from bokeh.document import Document

    document = Document()
    document.add_root(chart.figure)
    found = {"root_id": chart.figure.id, "doc": document.to_json(deferred=False), "version": bokeh.__version__}
    # A figure that still belongs to a document could not be written a second time.
    document.clear()
    return found


def _data(value: object) -> str:
    """JSON that may stand in a script element: nothing in it can end that element."""
    text = json.dumps(value, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def bokeh_script() -> str:
    """BokehJS as the installed package has it, without widgets, tables, WebGL and TeX."""
    from bokeh.util.paths import bokehjs_path

    text = (Path(bokehjs_path()) / "js" / "bokeh.min.js").read_text(encoding="utf-8")
    # A browser reads line ends as \n, and the hash is of what it reads.
    return text.replace("\r\n", "\n")


@cache
def _own(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode()


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Control bytes have no place on a page, whoever wrote them into a name.
        finalize=_printable,
    )


def _printable(value: object) -> object:
    return without_control(value) if type(value) is str else value
