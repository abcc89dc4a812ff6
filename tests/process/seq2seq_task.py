"""A Seq2SeqTrainer of transformers, to be adopted."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import BartConfig, BartForConditionalGeneration, EvalPrediction, Seq2SeqTrainer
from transformers import Seq2SeqTrainingArguments as Arguments

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
PAD = 1


class Reversed(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self, num: int) -> None:
        self.ids = torch.randint(5, 30, (num, 6), generator=torch.Generator().manual_seed(num))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self.ids[index]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.flip(0)}


class Metrics:
    """Of all predictions at once; or added up batch by batch, with a result at the end."""

    def __init__(self) -> None:
        self.hits = self.length = self.num = 0.0

    def __call__(self, given: EvalPrediction, compute_result: bool = True) -> dict[str, float]:
        # Without generation, the logits come with the output of the encoder.
        only = given.predictions[0] if isinstance(given.predictions, tuple) else given.predictions
        predictions, labels = torch.as_tensor(only), torch.as_tensor(given.label_ids)
        tokens = predictions if predictions.ndim == 2 else predictions.argmax(-1)
        width = min(tokens.shape[1], labels.shape[1])
        self.hits += float((tokens[:, :width] == labels[:, :width]).double().sum())
        self.length += float((tokens > PAD).sum())
        self.num += len(tokens)
        if not compute_result:
            return {}
        found = {"hits": self.hits / self.num, "length": self.length / self.num}
        self.__init__()  # type: ignore[misc]
        return found


def make_trainer(**more: Any) -> Seq2SeqTrainer:
    torch.manual_seed(0)
    sizes = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in SIZES.items()}
    config = BartConfig(vocab_size=32, d_model=16, max_position_embeddings=24, **sizes, **TOKENS, dropout=0.0)
    args = Arguments(
        output_dir="out",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        generation_max_length=9,
        learning_rate=1e-2,
        per_device_train_batch_size=6,
        per_device_eval_batch_size=6,
        **more,
    )
    return Seq2SeqTrainer(
        model=BartForConditionalGeneration(config),
        args=args,
        train_dataset=Reversed(40),
        eval_dataset=Reversed(13),
        compute_metrics=Metrics(),
    )


SIZES = {"layers": 1, "attention_heads": 2, "ffn_dim": 32}
TOKENS = {
    "pad_token_id": PAD,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
