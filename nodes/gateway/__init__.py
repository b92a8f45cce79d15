"""The OpenAI API in front of a whole cluster: `pd gateway`. A client on the bus, never a node.

command.py     the process
gateway.py     what its HTTP app asks: a cluster that answers like one node
answering.py   one request: a node for it, and another one when that fails in time
waiting.py     requests that wait for room
routing.py     which node: scores, pure
choices.py     a choice as it is recorded
prefixes.py    what nodes have cached of a prompt
prefix_index.py  of one node: a set of hashes, pure
fleet.py       the nodes, found and followed
fleet_node.py  one of them
flights.py     requests in flight, the last ones and the last errors, for people
ui/            the live page that shows them
endpoints.py   nodes named by host and port
"""
