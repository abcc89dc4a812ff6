"""Does this way of training learn what one device learns? Found by running both, and why not by testing the causes.

verdicts = check(prepared, [Way("ddp", ("cpu", "cpu"))], folder)        # the whole check
verdicts = check(prepared, ways, folder, Depth(steps=3, own_precision=False))   # a short one, for `compare`
"""

from evenstep.verify.check import Depth, check, judged
from evenstep.verify.tolerance import settled
from evenstep.verify.verdict import Configuration, Part, Verdict

__all__ = ["Configuration", "Depth", "Part", "Verdict", "check", "judged", "settled"]
