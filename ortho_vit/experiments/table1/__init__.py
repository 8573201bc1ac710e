"""The paper's Table 1: every optimizer and constraint on a ViT trained from scratch, as one resumable sweep.

    rows.py      what is compared: 16 rows of the paper, 4 of our own, learning rates, which projections; presets
    runs.py      a run: its folder, its command, its claim, its state
    sweep.py     starts runs, watches them, stops them
    progress.py  what is done, running and left
    records.py   finished runs as one JSON and one CSV file
    compare.py   means, spreads, paired differences
    tables.py    Markdown, and the page that holds it
    figures.py   curves, errors, the learning-rate sweep

`python -m ortho_vit.experiments.table1 --help`; docs/table1.md has the results.
"""
