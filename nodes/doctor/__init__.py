"""`pd doctor`: what of this machine matters to a node, what is wrong with it, and the setting that changes it."""
