"""`python -m pdbus.nodes.gateway PARENT ...`: `pd gateway` that ends with the process PARENT, which started it."""

from __future__ import annotations

import sys

from pdbus.connector.channel import end_with_parent
from pdbus.nodes.cli import main

if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    sys.argv[1] = "gateway"
    main()
