"""Whole clusters of real cores under a simulated clock: what a workload, a setting or a fault would do."""
