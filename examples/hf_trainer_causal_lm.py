"""A causal language model trained by transformers.Trainer, with tidegate's callback.

    python examples/hf_trainer_causal_lm.py
    python examples/hf_trainer_causal_lm.py --width 1024 --layers 12

Ends with 0 only if something moved.
"""

from __future__ import annotations

import argparse
import sys
import tempfile

from accelerate_causal_lm import build
from corpus import StandardLibrary
from transformers import Trainer, TrainingArguments

from tidegate import OffloadConfig
from tidegate.strategies import OffloadTrainerCallback


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device-budget", default="0", help="see OffloadConfig")
    parser.add_argument("--cpu", action="store_true", help="leave a GPU alone")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="optimiser steps")
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
