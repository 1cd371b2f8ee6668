"""`python -m peagle`, which is how `torchrun` starts a command in several processes."""

from peagle.cli.main import main

main()
