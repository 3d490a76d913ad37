"""One colour per kind of memory, the same in every view. Chosen to be told apart on light and on dark ground."""

from __future__ import annotations

COLOURS = {
    "held": "#868c96",
    "parameters": "#4a78b0",
    "buffers": "#7fb0d6",
    "input": "#4f9d8b",
    "gradients": "#bd9136",
    "optimizer": "#8a70b8",
    "kept": "#bf5b47",
    "transient": "#e2a18e",
    "training": "#4a78b0",
    "other": "#a9adb4",
}
"""The categories of a timeline, and what the process holds beside it."""

MEANING = {
    "held": "what the process holds beside the training's tensors",
    "parameters": "the model's weights",
    "buffers": "the model's buffers",
    "input": "the micro-batch on the device",
    "gradients": "gradients of the effective batch so far",
    "optimizer": "the optimizer's state",
    "kept": "saved for backward",
    "transient": "comes and goes while computing",
    "training": "parameters, gradients, the optimizer's state and what is computed, together",
    "other": "what the device holds beyond the tensors' own bytes, and what the script keeps beside",
}
"""What each category is, for people."""


def colour(category: str) -> str:
    """The colour of a category; that of "other" for one that is not known."""
    return COLOURS.get(category, COLOURS["other"])
