"""A causal language model trained by transformers.Trainer, with tidegate's callback.

    python examples/hf_trainer_causal_lm.py
    python examples/hf_trainer_causal_lm.py --width 1024 --layers 12

Ends with 0 only if something moved.
"""

from __future__ import annotations

import sys
import tempfile

from accelerate_causal_lm import build, options
from corpus import StandardLibrary
from transformers import Trainer, TrainingArguments

from tidegate import OffloadConfig
from tidegate.strategies import OffloadTrainerCallback


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--cpu", action="store_true", help="leave a GPU alone")
    args = parser.parse_args()

    callback = OffloadTrainerCallback(OffloadConfig(tiers=("disk",), device_budget=args.device_budget))
    with tempfile.TemporaryDirectory() as output:
        trainer = Trainer(
            build(args),
            TrainingArguments(
                output_dir=output,
                max_steps=args.steps,
                per_device_train_batch_size=args.batch,
                per_device_eval_batch_size=args.batch,
                gradient_accumulation_steps=args.accumulate,
                eval_strategy="steps",
                eval_steps=max(1, args.steps // 2),
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                use_cpu=args.cpu,
                dataloader_pin_memory=False,
            ),
            train_dataset=StandardLibrary(args.steps * args.accumulate * args.batch, args.context),
            eval_dataset=StandardLibrary(args.batch, args.context),
            callbacks=[callback],
        )
        trainer.train()
    stats = callback.offload_stats
    print(stats)
    return 0 if stats is not None and stats.moved else 1


if __name__ == "__main__":
    sys.exit(main())
