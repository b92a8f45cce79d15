if __name__ == "connector":
    raise ImportError("import pdbus.connector: a bare 'connector' would be a second copy of every class")
