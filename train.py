"""Train, validate, test or predict: `python train.py --help`."""

import sys

from ortho_vit.training.cli import main

if __name__ == "__main__":
    sys.exit(main())
