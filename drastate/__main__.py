"""``python -m drastate`` is the ``drastate`` command."""

from drastate.cli.main import main

if __name__ == "__main__":
    main()
