"""The command line: `train.py`, or `ortho-vit` where the package is installed."""
