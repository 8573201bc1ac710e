"""The paper's Table 1, and what the constraint itself contributes: optimizers and constraints on a ViT, in one sweep.

    rows.py      what is compared: the paper's rows and our own, in groups; the contrasts and their controls
    presets.py   the sizes of the experiment: network, images, epochs
    controls.py  callbacks of the controls: large initial weights, a fixed norm
    runs.py      a run: its folder, command, lock and state
    sweep.py     starts runs, watches them, stops them
    progress.py  what is done, running and left
    records.py   finished runs as one JSON and one CSV file
    compare.py   means, spreads, paired differences
    tables.py    Markdown, and the page that holds it
    figures.py   curves, errors, the learning-rate sweep, the contrasts

`python -m ortho_vit.experiments.table1 --help`; docs/table1.md has the results.
"""
