"""`pd eval`: what a model knows, and how likely it finds texts, through whatever nodes it is served by.

tasks.py      texts and questions, and where they come from
scoring.py    figures, by requests to a node
command.py    the command: a cluster of its own, or one that is there
"""
