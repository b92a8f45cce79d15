"""`python -m pdbus.nodes ...`: `pd-node` that ends with the process that started it. How a cluster starts its nodes."""

from __future__ import annotations

from pdbus.connector.channel import end_with_parent
from pdbus.nodes.cli import node_main

if __name__ == "__main__":
    end_with_parent()
    node_main()
