"""Looking into recordings."""
