"""`python -m pdbus.nodes.gateway ...`: `pd gateway` that ends with the process that started it."""

from __future__ import annotations

import sys

from pdbus.connector.channel import end_with_parent
from pdbus.nodes.cli import main

if __name__ == "__main__":
    end_with_parent()
    sys.argv.insert(1, "gateway")
    main()
