if __name__ == "bus":
    raise ImportError("import pdbus.bus: a bare 'bus' would be a second copy of every class")
