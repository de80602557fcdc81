"""A plain transformers.Trainer script that trains twice; prints losses and a digest of its final weights as JSON."""

import hashlib
import json
import sys
from pathlib import Path

from tests.strategies.causal_lm import Tokens, arguments, language_model
from transformers import Trainer

model = language_model()
trainer = Trainer(model, arguments(Path(sys.argv[1]), max_steps=4), train_dataset=Tokens(), eval_dataset=Tokens(8))
losses = []
for _ in range(2):
    trainer.train()
    losses += [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
losses.append(trainer.evaluate()["eval_loss"])
digest = hashlib.sha256()
for weight in model.state_dict().values():
    digest.update(weight.numpy().tobytes())
print(json.dumps({"losses": losses, "weights": digest.hexdigest()}))
