"""The live page of the gateway at /ui.

page.py   the page, as it is sent, and what it asks for
ui.html   what the browser draws
"""
