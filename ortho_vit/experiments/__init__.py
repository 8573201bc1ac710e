"""The paper's experiments, each a function that returns a `Result`, a plot and a command."""
