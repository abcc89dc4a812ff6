"""Does a configuration match training on one device? Both are run and compared; if they differ, causes are tested.

verdicts = check(prepared, [Configuration("ddp", ("cpu", "cpu"))], folder)        # the whole check
verdicts = check(prepared, configs, folder, Depth(steps=3, own_precision=False))   # a short one, for `compare`
"""

from evenstep.verify.exact import ExactDepth, judged_exactly
from evenstep.verify.verdict_table import Configuration, PartVerdict, Verdict
from evenstep.verify.verify_strategies import Depth, check, judged, settled

__all__ = [
    "Configuration",
    "Depth",
    "ExactDepth",
    "PartVerdict",
    "Verdict",
    "check",
    "judged",
    "judged_exactly",
    "settled",
]
