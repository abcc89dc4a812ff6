"""`--best METRIC`: the metric of an evaluation that it names, and whether less or more of it is better."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Literal

from evenstep.errors import MAX_CHARACTERS, PlanError, shorten

Direction = Literal["min", "max"]

SMALLER_IS_BETTER = "loss error err nll perplexity ppl mse rmse mae mape wer cer ter fid brier distance"

LARGER_IS_BETTER = (
    "accuracy acc top1 top5 auc auroc roc_auc ap map average_precision auprc f1 fbeta precision recall sensitivity "
    "specificity bleu rouge rouge1 rouge2 rougel meteor chrf iou miou dice jaccard psnr ssim r2 mcc kappa ndcg mrr hit "
    "return reward"
)


def parse_best(text: str | None) -> tuple[str, Direction]:
    """The metric that decides which checkpoint is the best, and whether its least or greatest value is.

    >>> parse_best(None), parse_best("accuracy"), parse_best("clean/rmse"), parse_best("score:max")
    (('loss', 'min'), ('accuracy', 'max'), ('clean/rmse', 'min'), ('score', 'max'))
    """
    metric = metric_of(text)
    if text is not None and metric != text:
        return metric, "min" if text.endswith(":min") else "max"
    # Of clean/rmse, clean is the name of a validation set.
    last = metric.lower().rpartition("/")[2]
    words = {*re.split(r"[^a-z0-9]+", last), last}
    is_smaller, is_larger = bool(words & {*SMALLER_IS_BETTER.split()}), bool(words & {*LARGER_IS_BETTER.split()})
    if is_smaller == is_larger:
        shown = shorten(metric)
        known = [*SMALLER_IS_BETTER.split(), *LARGER_IS_BETTER.split()]
        close = difflib.get_close_matches(metric[:MAX_CHARACTERS], known, n=1)
        raise PlanError(
            f"is a larger {shown} better, or a smaller one? Write --best {shown}:max or --best {shown}:min"
            f"{f', or did you mean {close[0]}?' if close else ''}"
        )
    return metric, "min" if is_smaller else "max"


def metric_of(best: str | None) -> str:
    """The metric that --best names, without its direction."""
    return re.sub("(?<=.):(min|max)$", "", best or "loss", flags=re.DOTALL)


def find_metric(metric: str, names: Iterable[str]) -> str | None:
    """The value that a metric names: of several validation sets, that of the first.

    >>> find_metric("loss", ["loss", "auc"]), find_metric("loss", ["clean/loss", "noisy/loss"]), find_metric("f1", [])
    ('loss', 'clean/loss', None)
    """
    names = list(names)
    return metric if metric in names else next((name for name in names if name.endswith(f"/{metric}")), None)
