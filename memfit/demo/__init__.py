"""The demo: trains a small GPT on the source text of Python's own library, in far less memory than the whole batch needs.

show.py    what the reader sees, in order; runs the other two in separate processes
whole.py   one step without memfit, under the limit
train.py   the training with memfit, under the same limit
"""
