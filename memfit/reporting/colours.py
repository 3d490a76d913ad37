"""One colour per kind of memory, the same in every view, distinguishable on light and on dark backgrounds."""

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
"""Colours by timeline category, and for what the process holds beside the timeline."""

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
"""Descriptions of the categories."""


def colour(category: str) -> str:
    """Return the colour of a category; an unknown one gets the colour of "other"."""
    return COLOURS.get(category, COLOURS["other"])
