"""Train, validate, test or predict: `python train.py --help`.  An installed package has the same as `ortho-vit`."""

import sys

from ortho_vit.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
