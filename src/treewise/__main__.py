"""Let ``python -m treewise`` run the command line."""

from treewise.cli import main

main()
