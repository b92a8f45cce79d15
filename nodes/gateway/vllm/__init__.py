"""`pd gateway --vllm`: in front of vLLM servers with our connector, by HTTP alone."""
