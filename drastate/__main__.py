"""``python -m drastate`` is the ``drastate`` command."""

import sys

from drastate.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
