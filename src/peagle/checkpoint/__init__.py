"""Reading and writing drafter directories: configs, weights, cards, and the layouts of other projects."""
