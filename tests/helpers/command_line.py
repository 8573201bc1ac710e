"""What the tests of the command line share: a small configuration, and where the repository is."""

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
DIGITS = """
model:
  name: ortho_vit_digits
  optimizer:
    class_path: ortho_vit.optim.StiefelSGD
    init_args: {lr: 0.1, momentum: 0.9}
data:
  class_path: ortho_vit.data.Digits
  init_args: {batch_size: 64, limit: 192}
trainer: {max_epochs: 2, accelerator: cpu, devices: 1}
"""
