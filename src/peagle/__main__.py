"""`python -m peagle`: how torchrun starts a command in several processes."""

from peagle.cli.main import main

main()
