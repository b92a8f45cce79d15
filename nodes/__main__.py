"""`python -m pdbus.nodes PARENT ...`: `pd-node` that ends with the process PARENT, which started it. How a cluster
starts its nodes."""

from __future__ import annotations

import sys

from pdbus.connector.channel import end_with_parent
from pdbus.nodes.cli import node_main

if __name__ == "__main__":
    end_with_parent(int(sys.argv.pop(1)))
    node_main()
