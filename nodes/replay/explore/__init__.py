"""All that could happen between a few nodes, instead of what did."""
