"""The demo: a small GPT trained on this Python's own library, far beyond the memory it may take.

show.py    what the reader sees, in order; runs the other two in processes of their own
whole.py   one step without memfit, under the limit
train.py   the training with memfit, under the same limit
"""
