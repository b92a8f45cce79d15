if __name__ == "nodes":
    raise ImportError("import pdbus.nodes: a bare 'nodes' would be a second copy of every class")
