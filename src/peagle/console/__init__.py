"""What all commands share: arguments and their parsing, progress bars, recipes."""
