"""``python -m tileweave`` is the command ``tileweave``."""

from tileweave.commands.app import main

if __name__ == "__main__":  # started ranks import this file too
    main()
