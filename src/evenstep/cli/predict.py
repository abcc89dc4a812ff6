"""`evenstep predict`: what would n devices give, and how wrong is that?"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from evenstep.cli.app import JsonOption, app, flag
from evenstep.errors import BadInput

if TYPE_CHECKING:
    from evenstep.predict.published import CheckResult

EXAMPLES = """
[bold]Examples[/bold]

evenstep predict --check
"""


@app.command(epilog=EXAMPLES)
def predict(
    check: Annotated[
        bool, flag("--check", help="Predict published scaling tables, and print the errors of that.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print how wrong forecasts of more devices are, by published tables."""
    if not check:
        raise BadInput("give --check")
    _check(as_json=as_json)


def _check(*, as_json: bool) -> None:
    from evenstep.predict.published import check_published
    from evenstep.predict.shown import show_check

    result = check_published()
    if as_json:
        print(json.dumps(_plain(result)))
        return
    show_check(result, Console(highlight=False, emoji=False))


def _plain(result: CheckResult) -> dict[str, object]:
    return {**dataclasses.asdict(result), "rows": [dataclasses.asdict(row) for row in result.rows]}
