"""Models as files: configurations, checkpoints, weights. Only `loader` and `llama` import torch."""
