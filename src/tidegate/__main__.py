"""`python -m tidegate` is the `tidegate` command."""

from tidegate.cli import main

main()
