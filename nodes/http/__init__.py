"""The OpenAI API over one node, or over a cluster (nodes/gateway). At a node it is a process of its own, so that its
load never delays a heartbeat.

server.py    the process: an inherited listening socket, uvicorn, its end
protocol.py  a connection: what is no HTTP request, and what takes too long
body.py      a body of JSON
upstream.py  what answers behind it
app.py       paths, health, models, info
schema.py    what a client may ask: OpenAI's bodies in, one `Asked` out
stream.py    one request, answered as it comes or whole
answer.py    a request's answer in OpenAI's words
peers.py     /add_remote_prefill_eps and its kin
metrics.py   /metrics
keys.py      the file of bearer keys
bearer.py    only who sends one is served
errors.py    every error as OpenAI's error object
"""
